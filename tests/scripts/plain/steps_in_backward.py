"""An optimizer for each parameter, which steps in a hook as soon as its gradient is there.

With `thread` the hooks step in another thread, as autograd's do on a GPU.
"""

import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
loader = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=6)
optimizers = {p: torch.optim.Adam([p], lr=1e-3) for p in model.parameters()}


def update(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


def hook(parameter):
    if "thread" not in sys.argv:
        update(parameter)
        return
    thread = threading.Thread(target=update, args=(parameter,))
    thread.start()
    thread.join()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(hook)
for _ in range(100_000):
    for (x,) in loader:
        model(x).square().mean().backward()
