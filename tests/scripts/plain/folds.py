"""Cross-validation: a fresh model and a fresh optimizer for each fold, of twenty steps."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
data = TensorDataset(torch.randn(160, 8))
for _ in range(10_000):
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for (x,) in DataLoader(data, batch_size=8):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
