"""Loader workers by spawn, with the usual main guard."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((8,), float(index)), torch.tensor(float(index * index))


def main():
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(
        Squares(), batch_size=2, num_workers=1, multiprocessing_context="spawn", shuffle=True
    )
    for _ in range(int(sys.argv[-1]) if "--epochs" in sys.argv else 50):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()


if __name__ == "__main__":
    main()
