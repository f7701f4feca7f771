"""Layers that spend most of their time on drawing dropout masks."""

import torch
from torch import nn


class Layer(nn.Module):
    """A small product, and a large mask."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 16)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.repeat(1, 64)
        wide = self.drop(wide)
        return self.mix(wide[:, :16])


torch.manual_seed(0)
model = nn.Sequential(Layer(), Layer(), Layer())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(40):
    loss = model(torch.randn(256, 16)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
