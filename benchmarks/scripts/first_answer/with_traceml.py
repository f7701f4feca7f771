"""Train on features that take a millisecond of Python each: steps wait for the loader."""

import torch
import traceml_ai as traceml
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 2000

    def __getitem__(self, number):
        total = 0.0
        for k in range(10_000):
            total += (number * k) % 7
        return torch.full((256,), total / 30_000), number % 10


traceml.init(mode="auto")
loader = DataLoader(Rows(), batch_size=32, shuffle=True)
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(6):
    for rows, classes in loader:
        with traceml.trace_step(model):
            loss = nn.functional.cross_entropy(model(rows), classes)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    print(epoch, loss.item())
