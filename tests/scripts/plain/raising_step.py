"""The third batch raises inside the optimizer's closure, and the script goes on without it."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(8, 1)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.01, max_iter=1)

for number in range(400):
    x = torch.randn(16, 8)

    def closure(x=x, number=number):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        if number == 2:
            raise FloatingPointError("a bad batch")
        loss.backward()
        return loss

    try:
        optimizer.step(closure)
    except FloatingPointError:
        continue
