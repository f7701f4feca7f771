"""Puts an object without `flush` in the place of stdout, as `print` allows."""

import sys

import torch
from torch import nn


class Tee:
    def write(self, text):
        return sys.__stdout__.write(text)


sys.stdout = Tee()
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(2_000):
    optimizer.zero_grad()
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
sys.exit("the trial did not end")
