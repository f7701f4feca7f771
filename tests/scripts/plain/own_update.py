"""Its own update rule with torch.autograd.grad: no optimizer, no backward, two gradients a step."""

import sys

import torch
from torch import nn

import flatout

torch.manual_seed(0)
is_marked = "--marked" in sys.argv
is_functional = "--functional" in sys.argv
model = nn.Linear(8, 1)
parameters = dict(model.named_parameters())
momentum = {name: torch.zeros_like(p) for name, p in parameters.items()}


def loss_of(values, x, y):
    return (torch.func.functional_call(model, values, (x,)) - y).square().mean()


def update(gradients):
    with torch.no_grad():
        for name, gradient in gradients.items():
            momentum[name].mul_(0.9).add_(gradient)
            parameters[name].sub_(momentum[name], alpha=0.01)


def gradients_of(x, y):
    if is_functional:
        return torch.func.grad(loss_of)(parameters, x, y)
    grads = torch.autograd.grad(loss_of(parameters, x, y), list(parameters.values()))
    return dict(zip(parameters, grads, strict=True))


def train_step():
    for _ in range(2):  # two half batches, one update each
        update(gradients_of(torch.randn(4, 8), torch.randn(4, 1)))


for _ in range(100_000 if is_marked or not is_functional else 50):
    if is_marked:
        with flatout.step():
            train_step()
    else:
        train_step()
