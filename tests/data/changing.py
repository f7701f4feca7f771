"""Data sets that a script changes between epochs, and scripts that do."""

import torch
from torch.utils.data import Dataset, Subset

LENGTH = 24


class Negatives(Dataset):
    """The usual data of neural collaborative filtering: `ng_sample` draws new negatives."""

    def __init__(self):
        self.positives = [[user, user + 1] for user in range(LENGTH // 2)]
        self.draws = 0
        self.ng_sample()

    def ng_sample(self):
        self.draws += 1
        drawn = [[user, 100 * self.draws + user] for user, _ in self.positives]
        self.features = self.positives + drawn
        self.texts = [str(item) for _, item in self.features]

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor(self.features[index])


class Refilled(Negatives):
    """The same, but the list is filled anew in place."""

    def ng_sample(self):
        self.draws = 1
        if not hasattr(self, "features"):
            super().ng_sample()
        self.features[:] = [[user, item + 1000] for user, item in self.features]


class Times:
    """A transform with a setting."""

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor


class Sized(Dataset):
    """Samples of a size that may be set, through a transform that may be swapped."""

    def __init__(self):
        self.size = 2
        self.transform = Times(1.0)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return self.transform(torch.full((self.size,), float(index)))


class Counting(Sized):
    """It counts what is read of it, and keeps what it made last."""

    def __init__(self):
        super().__init__()
        self.reads = 0
        self.latest = None

    def __getitem__(self, index):
        self.reads += 1
        self.latest = super().__getitem__(index)
        return self.latest


class Part(Subset):
    """A part of another set."""

    def __init__(self):
        super().__init__(Sized(), range(LENGTH))


def draw(dataset):
    """Draw new negatives."""
    dataset.ng_sample()


def grow(dataset):
    """Resize progressively."""
    dataset.size += 1


def swap(dataset):
    """Swap the transform."""
    dataset.transform = Times(dataset.transform.factor + 1)


def set_inside(dataset):
    """Change a setting of the transform."""
    dataset.transform.factor += 1


def grow_wrapped(dataset):
    """Resize the set that another one wraps."""
    dataset.dataset.size += 1


CHANGES = {
    "draw": (Negatives, draw),
    "refill": (Refilled, draw),
    "grow": (Sized, grow),
    "swap": (Sized, swap),
    "set inside": (Sized, set_inside),
    "grow wrapped": (Part, grow_wrapped),
    "counting": (Counting, grow),
}
"""Kinds of data sets and what a script does to them."""


def seen(loader, change, before_epoch=lambda _: None, batches=lambda iterator, _: iterator):
    """Return the batches of four epochs; before the last two the data set is changed."""
    torch.manual_seed(0)
    found = []
    for epoch in range(4):
        if epoch > 1:
            change(loader.dataset)
        before_epoch(loader)
        found += [batch.tolist() for batch in batches(iter(loader), loader)]
        found.append(torch.rand(1).item())
    return found


def passed(hook_point):
    """Return a hook point of a technique as a session calls it.

    A refusal leaves the value as it is.
    """
    from flatout.records.errors import NotApplicable

    def call(value, *context):
        try:
            return hook_point(value, *context)
        except NotApplicable:
            return value

    return call
