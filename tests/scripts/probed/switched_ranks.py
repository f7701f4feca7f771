"""Two ranks that average their gradients, for screens; each step checks that both are alike."""

import time

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(100_000):
    loss = model(torch.randn(4, 8)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    is_fused = torch.tensor(float(bool(optimizer.param_groups[0]["fused"])))
    both = is_fused.clone()
    distributed.all_reduce(both)
    assert both == 2 * is_fused
    time.sleep(0.005)
