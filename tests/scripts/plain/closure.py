"""LBFGS calls its closure several times in a step, always with the same samples."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
nn.init.zeros_(model.weight)
nn.init.zeros_(model.bias)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=4)

for _ in range(100_000):
    x, y = torch.randn(16, 8), torch.ones(16, 1)

    def closure(x=x, y=y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
