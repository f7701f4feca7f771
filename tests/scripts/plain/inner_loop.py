"""A loop within a loop: each task trains a copy for two steps, then the model makes one."""

import copy

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for _ in range(100_000):
    learner = copy.deepcopy(model)
    inner = torch.optim.SGD(learner.parameters(), lr=0.01)
    for _ in range(2):
        loss = learner(torch.randn(4, 8)).square().mean()
        inner.zero_grad()
        loss.backward()
        inner.step()
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
