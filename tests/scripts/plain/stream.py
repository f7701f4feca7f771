"""An iterable data set whose batches are objects of the script's own; it ends without clean-up."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset


class Stream(IterableDataset):
    def __iter__(self):
        for number in range(8 * 20):
            yield torch.full((16,), number / 160), number % 3


class Batch:
    def __init__(self, rows):
        self.names = [f"row {label}" for _, label in rows]
        self.x = torch.stack([x for x, _ in rows])
        self.y = torch.tensor([label for _, label in rows])

    def to(self, device):
        self.x, self.y = self.x.to(device), self.y.to(device)
        return self


torch.manual_seed(0)
model = nn.Linear(16, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for batch in DataLoader(Stream(), batch_size=8, collate_fn=Batch):
    batch = batch.to("cpu")
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(batch.x), batch.y).backward()
    optimizer.step()
os._exit(0)
