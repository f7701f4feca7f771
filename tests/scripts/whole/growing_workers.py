"""Trains from workers that keep what they made: `python growing_workers.py keeps|replaces`."""

import sys
import time

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

KEPT = {"keeps": 10**6, "replaces": 1}[sys.argv[1]]
"""Samples that the data set's cache holds at most."""


class Cached(Dataset):
    def __init__(self):
        self.kept = []

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(0.1)
        self.kept.append(np.full(2**17, float(index)))
        del self.kept[:-KEPT]
        return torch.ones(8)


def main():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in DataLoader(Cached(), batch_size=4, num_workers=2):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


if __name__ == "__main__":
    main()
