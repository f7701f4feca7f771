"""Build a model by calls with symbols, as Keras does: their first dimension is not known yet."""

import torch
from torch import nn


class Symbol:
    """What a layer is called with before there is data."""

    dtype = torch.float32

    def __init__(self, width):
        self.shape = (None, width)


class Layer(nn.Linear):
    """A layer that answers a symbol with a symbol."""

    def forward(self, x):
        return Symbol(self.out_features) if isinstance(x, Symbol) else super().forward(x)


first, last = Layer(16, 32), Layer(32, 4)
last(first(Symbol(16)))
model = nn.Sequential(first, nn.ReLU(), last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(200):
    optimizer.zero_grad()
    model(torch.randn(32, 16)).square().mean().backward()
    optimizer.step()
