"""A data set that needs 20 ms for each sample; arguments: workers, and samples if not 160."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

WORKERS = int(sys.argv[1])
COUNT = int(sys.argv[2]) if len(sys.argv) > 2 else 160


class Slow(Dataset):
    def __len__(self):
        return COUNT

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.rand(4)


if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loader = DataLoader(Slow(), batch_size=4, num_workers=WORKERS, persistent_workers=WORKERS > 0)
    unused = DataLoader(Slow(), batch_size=4)
    next(iter(unused))
    for _ in range(100):
        for x in loader:
            time.sleep(0.2)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
