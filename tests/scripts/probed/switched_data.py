"""A training that waits for its samples: python switched_data.py WORKERS EPOCHS.

A sample takes 20 ms to make, the same each time.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

workers, epochs = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)


class Slow(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.full((8,), float(index))


model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
loader = DataLoader(Slow(), batch_size=4, num_workers=workers, shuffle=True)
for _ in range(epochs):
    for batch in loader:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
