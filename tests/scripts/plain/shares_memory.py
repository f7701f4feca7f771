"""Trains on memory that it shares; all of its own is removed at its end."""

import multiprocessing
import sys
from multiprocessing.shared_memory import SharedMemory

import torch
from torch import nn

name = sys.argv[1]
torch.multiprocessing.set_sharing_strategy("file_system")
named = SharedMemory(name=f"{name}-data", create=True, size=4096)
unnamed = SharedMemory(create=True, size=4096)
queue = multiprocessing.get_context("spawn").Queue()
inputs = torch.randn(4, 8).share_memory_()

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(1_000_000):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()

for memory in (named, unnamed):
    memory.close()
    memory.unlink()
