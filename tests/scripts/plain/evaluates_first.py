"""Evaluates between the drawing of a batch and its use: all of the evaluation set, or a part."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

most = int(sys.argv[1]) if len(sys.argv) > 1 else None
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train = DataLoader(TensorDataset(torch.randn(48, 8)), batch_size=6)
test = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=16)


def evaluate():
    model.eval()
    with torch.no_grad():
        for number, (x,) in enumerate(test):
            if number == most:
                break
            model(x)
    model.train()


for _ in range(100_000):
    for number, (x,) in enumerate(train):
        if number % 4 == 0:
            evaluate()
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
