"""Swallows every exception in the loop and saves in `finally`."""

import torch
from torch import nn

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
try:
    for _ in range(3_000):
        try:
            optimizer.zero_grad()
            model(torch.randn(4, 8)).square().mean().backward()
            optimizer.step()
        except BaseException:
            pass
finally:
    with open("model.pt", "wb") as file:
        torch.save(model.state_dict(), file)
