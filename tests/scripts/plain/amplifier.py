"""Layers with BatchNorm that amplify every rounding; `lose`: a large number added and taken off."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

OFFSET = 300.0


class Loser(nn.Module):
    def __init__(self):
        super().__init__()
        self.far, self.head = nn.Linear(64, 64), nn.Linear(64, 8)
        nn.init.constant_(self.far.bias, OFFSET)

    def forward(self, x):
        return self.head(torch.relu(self.far(x) - OFFSET))


torch.manual_seed(1)
data = TensorDataset(torch.randn(512, 64), torch.randint(0, 8, (512,)))
loader = DataLoader(data, batch_size=64, shuffle=True)
layers = [
    nn.Sequential(nn.Linear(64, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(10)
]
model = Loser() if "lose" in sys.argv else nn.Sequential(*layers, nn.Linear(64, 8))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
while True:
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
