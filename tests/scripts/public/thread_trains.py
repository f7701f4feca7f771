"""Train in a thread of its own, as programs with a window do."""

import threading

import torch
from torch import nn


def train():
    model = nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(50):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()


thread = threading.Thread(target=train)
thread.start()
thread.join()
