"""Two ranks that each train a part of their own, under names that the other one does not have."""

import os
from collections import OrderedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

rank = int(os.environ["RANK"])
torch.set_num_threads(1)
torch.manual_seed(rank)
dist.init_process_group("gloo")
rows = TensorDataset(torch.randn(64, 16), torch.randint(0, 4, (64,)))
loader = DataLoader(rows, batch_size=4)
model = nn.Sequential(OrderedDict({f"stage{rank}": nn.Linear(16, 4)}))
optimizer = torch.optim.SGD(model.parameters(), lr=(0.1, 0.01)[rank])

for _ in range(2_000):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        dist.barrier()  # as where one part waits for the other's output
