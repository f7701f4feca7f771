"""Trainings that cannot be spread: the argument says which."""

import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(17)
kind = sys.argv[1]
if kind == "own group":
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = tuple(model.parameters()) if kind == "tuple" else ()
for x, y in DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 2)), batch_size=8):
    out = model(x)
    loss = (out - y).square().mean()
    optimizer.zero_grad()
    loss.backward()
    if kind == "changed apart":
        with torch.no_grad():
            model.weight += torch.rand_like(model.weight)
    optimizer.step()
    if kind == "one fails" and torch.distributed.is_initialized() and torch.distributed.get_rank():
        raise RuntimeError("a disk of this rank is full")
    print("loss", loss.item(), flush=True)
print("trained to the end", os.getpid())
