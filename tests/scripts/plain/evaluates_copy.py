"""Evaluates another model than the one that trains, every fifth step and in part of its data.

The first argument says which: a copy, averaged weights, the model inside a wrapper or the one that
was compiled; `teacher` calls a copy in every step.
"""

import copy
import sys

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
if kind == "inside":
    model = Wrapper(model)
trained = torch.compile(model, backend="aot_eager") if kind == "compiled" else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=6)
held_out = DataLoader(TensorDataset(torch.randn(640, 8)), batch_size=16)
averaged = AveragedModel(model)
steps = 0


def evaluated():
    if kind == "averaged":
        return averaged
    if kind == "compiled":
        return model
    return model.module if kind == "inside" else copy.deepcopy(model)


@torch.inference_mode()
def evaluate():
    other = evaluated().eval()
    for number, (x,) in enumerate(held_out):
        if number == 20:
            break
        other(x)
    model.train()


for _ in range(100_000):
    for (x,) in train:
        if kind == "teacher":
            with torch.no_grad():
                averaged.module(x)
        optimizer.zero_grad()
        trained(x).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
        steps += 1
        if steps % 5 == 0:
            evaluate()
