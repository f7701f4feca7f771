"""Data sets that worker processes can load, whatever way they are started."""

import random

import numpy as np
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info


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


class Centred(Numbers):
    """A data set that makes whole batches, each less its mean."""

    def __getitem__(self, index):
        return self.__getitems__([index])[0]

    def __getitems__(self, indices):
        mean = sum(indices) / len(indices)
        return [torch.tensor(index - mean) for index in indices]


class Augmented(Numbers):
    """Each sample is drawn from the three global streams, and the worker's seed."""

    def __getitem__(self, index):
        info = get_worker_info()
        drawn = (torch.rand(()).item(), random.random(), float(np.random.rand()))
        return torch.tensor([index, *drawn, info.seed if info else 0], dtype=torch.float64)


class OwnGenerators(Numbers):
    """Each sample is drawn from generators that the data set holds, one of them in a transform."""

    def __init__(self, length=12):
        super().__init__(length)
        self.numpy = np.random.default_rng(0)
        self.transforms = [random.Random(0)]
        self.older = np.random.RandomState(0)

    def __getitem__(self, index):
        drawn = (self.numpy.random(), self.transforms[0].random(), self.older.rand())
        return torch.tensor([index, *drawn], dtype=torch.float64)


class KeepsAugmented(Augmented):
    """A data set that keeps what it drew, which is gone with its worker."""

    def __init__(self, length=12):
        super().__init__(length)
        self.kept = {}

    def __getitem__(self, index):
        if index not in self.kept:
            self.kept[index] = super().__getitem__(index)
        return self.kept[index]


class KeepsFiles(Augmented):
    """A data set that keeps what is the same each time, and draws each time."""

    def __init__(self, length=12):
        super().__init__(length)
        self.kept = {}

    def __getitem__(self, index):
        return self.kept.setdefault(index, torch.tensor(index)) + super().__getitem__(index)


class LateGenerator(Numbers):
    """A data set that makes its generator when its first sample is asked for."""

    generator = None

    def __getitem__(self, index):
        if self.generator is None:
            self.generator = random.Random(0)
        return torch.tensor([index, self.generator.random()], dtype=torch.float64)


class CountsEpochs(IterableDataset):
    """A data set that seeds its order by a count of its own."""

    count = 0

    def __init__(self):
        self.count = 0

    def __iter__(self):
        self.count += 1
        return iter([torch.tensor(self.count), torch.tensor(-self.count)])


class ShufflesInPlace(IterableDataset):
    """A data set that shuffles the list that it keeps when an epoch begins."""

    def __init__(self):
        self.order = [torch.tensor(number) for number in range(8)]

    def __iter__(self):
        random.shuffle(self.order)
        return iter(list(self.order))


def seed_by_worker(number):
    """A `worker_init_fn` as in torch's notes on reproducibility, and one more draw."""
    seed = torch.initial_seed() % 2**32 + 7
    np.random.seed(seed)
    random.seed(seed)
    torch.rand(())


def mark_data_set(number):
    """A `worker_init_fn` that works on the worker's copy of the data set."""
    dataset = get_worker_info().dataset
    dataset.length = dataset.length + 1
    random.seed(number)


class Stream(IterableDataset):
    """A data set that every worker repeats."""

    def __iter__(self):
        return iter(range(4))


def gpu_in_sight(monkeypatch, technique):
    """Pretend a GPU; return what sets where the training is, as a technique's module sees it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return lambda name: monkeypatch.setattr(technique, "batch_device", lambda: torch.device(name))
