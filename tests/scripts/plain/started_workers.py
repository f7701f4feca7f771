"""Loads without workers, or with some set by hand; how workers start is chosen in several ways.

`--method` sets it for the process, `--context` for the loader. `--local`: samples go through a
function that cannot be pickled. `--bare`: trains outside the main guard. `--epochs`: ends then.
"""

import argparse
import hashlib
import multiprocessing

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--method")
parser.add_argument("--context")
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--local", action="store_true")
parser.add_argument("--bare", action="store_true")
parser.add_argument("--epochs", type=int, default=400)
args = parser.parse_args()


class Squares(Dataset):
    def __init__(self, change):
        self.change = change

    def __len__(self):
        return 256

    def __getitem__(self, index):
        x = self.change(torch.full((8,), index / 256))
        return x, x[0] * x[0]


def main():
    multiprocessing.set_start_method(args.method, force=True)
    torch.manual_seed(0)
    change = (lambda x: x + 1) if args.local else torch.exp
    loader = DataLoader(
        Squares(change),
        batch_size=4,
        num_workers=args.workers,
        multiprocessing_context=args.context,
        shuffle=True,
    )
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen = hashlib.sha256()
    for _ in range(args.epochs):
        for x, y in loader:
            seen.update(x.numpy().tobytes() + y.numpy().tobytes())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x)[:, 0], y)
            loss.backward()
            optimizer.step()
    print("batches", seen.hexdigest())


if __name__ == "__main__" and not args.bare:
    main()
if args.bare:
    main()
