"""Epochs of ten steps whose two workers start anew each time."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.rand(4)


if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(1000):
        for x in DataLoader(Slow(), batch_size=4, num_workers=2):
            time.sleep(0.02)
            model(x).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
