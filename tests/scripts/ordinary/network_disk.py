"""Fine-tune a classifier on features that a network share holds, one file a sample."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Features(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, index):
        time.sleep(0.002)  # what the share takes to answer
        generator = torch.Generator().manual_seed(index)
        return torch.randn(256, generator=generator), index % 10


model = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loader = DataLoader(Features(), batch_size=16, shuffle=True)

for epoch in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: loss {loss.item():.3f}")
