"""Train a small network on samples of bytes that are never in the page cache.

    python naive_samples.py --data samples            # a folder of .npy files, one folder a class
    python naive_samples.py --store samples.packed    # the same, packed

It stands for a data set larger than memory: the kernel is told to forget the files before each
epoch. Otherwise an ordinary script; with a store it reads that through `flatout.data.open`.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

CLASSES, EVERY = 10, 200


class Files(Dataset):
    """The arrays of a folder, labelled by their number."""

    def __init__(self, folder):
        self.paths = sorted(folder.rglob("*.npy"))

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return features(np.load(self.paths[index])), int(self.paths[index].stem) % CLASSES


class Stored(Dataset):
    """The samples of a packed store."""

    def __init__(self, path):
        import flatout.data

        self.data = flatout.data.open(path)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        sample = self.data[index]
        return features(sample["x"]), int(sample["label"])


def features(values):
    """Return what the network sees of a sample: every so many bytes."""
    return torch.from_numpy(np.asarray(values).reshape(-1)[::EVERY] / np.float32(255))


def forget(folder):
    """Let the kernel forget the files, so that the next reads are cold."""
    for path in filter(Path.is_file, folder.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main():
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--store", type=Path)
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(0)

    folder = args.store or args.data
    forget(folder)
    data = Stored(args.store) if args.store else Files(args.data)
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=args.workers)
    model = nn.Sequential(nn.LazyLinear(128), nn.ReLU(), nn.Linear(128, CLASSES))
    model(data[0][0][None])
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for epoch in range(args.epochs):
        forget(folder)
        for values, labels in loader:
            loss = functional.cross_entropy(model(values), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)


if __name__ == "__main__":
    main()
