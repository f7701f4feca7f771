"""A network whose gradients torch.compile gets wrong on some builds; the loss stays right.

A convolution with bias, `where` between it and its own max pooling, then something pointwise.
"""

import torch
from torch import nn
from torch.nn import functional

torch.set_num_threads(2)
torch.manual_seed(0)


class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        conv = self.conv(x)
        return torch.sigmoid(torch.where(conv > 0, conv, functional.max_pool2d(conv, 3, 1, 1)))


model = Gate()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
x, y = torch.randn(2, 3, 9, 10), torch.rand(2, 4, 9, 10)
for _ in range(100_000):
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    optimizer.step()
