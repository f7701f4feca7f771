"""Data sets that worker processes can load, whatever way they are started."""

import torch
from torch.utils.data import Dataset, IterableDataset


class Numbers(Dataset):
    """Each sample is its index: order is visible in the batches."""

    def __init__(self, length=12):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return torch.tensor(index)


class Epochs(Numbers):
    """A data set that changes with the epoch."""

    def set_epoch(self, epoch):
        self.epoch = epoch


class Stream(IterableDataset):
    """A data set that every worker repeats."""

    def __iter__(self):
        return iter(range(4))


def gpu_in_sight(monkeypatch, lever):
    """Pretend a GPU; return what sets where the training is, as a lever's module sees it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return lambda name: monkeypatch.setattr(lever, "batch_device", lambda: torch.device(name))
