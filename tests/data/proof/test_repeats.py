import os
import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset

from flatout.data.proof.dataset_facts import examine
from flatout.data.proof.random_streams import Streams


class Made(Dataset):
    """Each sample is what a function makes of its index."""

    def __init__(self, make, length=40):
        self.make = make
        self.length = length
        self.calls = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.calls += 1
        return self.make(index)


def test_a_set_that_repeats_itself_is_found_with_its_size():
    found = examine(Made(lambda index: torch.full((1000,), float(index))))

    assert found.is_same
    assert 4000 <= found.sample_bytes < 4300


@pytest.mark.parametrize(
    "make",
    [
        lambda _: random.random(),
        lambda _: torch.rand(1),
        lambda _: np.random.rand(),
        lambda index: index if random.random() < 2 else 0,
        lambda index: index if index < 39 or torch.rand(1) < 2 else 0,
    ],
    ids=["python", "torch", "numpy", "drawn in vain", "the last only"],
)
def test_a_set_that_draws_from_a_global_stream_is_seen(make):
    assert "draws random numbers" in examine(Made(make)).trouble


@pytest.mark.parametrize(
    "make", [lambda _: os.urandom(4), lambda _: np.random.default_rng().random()]
)
def test_a_set_with_randomness_of_its_own_is_seen(make):
    assert "another one each time" in examine(Made(make)).trouble


def test_neither_the_streams_nor_the_set_are_touched():
    made = Made(lambda _: torch.rand(1))
    streams = Streams()

    examine(made)

    assert not streams.are_moved()
    assert made.calls == 0


def test_a_set_that_fails_hangs_or_is_empty_is_not_taken_for_good():
    def fail(_):
        raise OSError("no such file: cat.jpg")

    assert "no such file: cat.jpg" in examine(Made(fail)).trouble
    assert "not done within" in examine(Made(lambda _: time.sleep(60)), limit_s=0.5).trouble
    assert "empty" in examine(Made(None, length=0)).trouble


def test_a_set_that_changes_with_the_epoch_is_left_alone():
    changing = Made(lambda index: index)
    changing.set_epoch = lambda _: None

    assert "set_epoch" in examine(changing).trouble


class Batched(Made):
    """A set that makes whole batches, which torch's loader then asks for."""

    def __init__(self, make_batch):
        super().__init__(lambda index: torch.full((3,), float(index)))
        self.make_batch = make_batch

    def __getitems__(self, indices):
        return self.make_batch([self[index] for index in indices])


class Forwarding:
    """A wrapper that hands everything else on: torch finds `__getitems__` behind it."""

    def __init__(self, held):
        self.held = held

    def __len__(self):
        return len(self.held)

    def __getitem__(self, index):
        return self.held[index] + 1

    def __getattr__(self, name):
        return getattr(vars(self)["held"], name)


def test_batches_of_the_samples_are_taken():
    assert examine(Batched(list)).is_same
    assert examine(Subset(Made(lambda index: torch.tensor(index)), [3, 1, 2])).is_same


@pytest.mark.parametrize(
    "make_batch",
    [
        lambda batch: [sample + len(batch) for sample in batch],
        lambda batch: [sample - batch[0] for sample in batch],
        lambda batch: sorted(batch, key=lambda sample: sample[0].item()),
        lambda batch: [torch.nn.functional.pad(x, (0, len(batch) - 1)) for x in batch],
    ],
    ids=["size", "first", "sorted", "padded"],
)
def test_batches_that_differ_from_the_samples_are_seen(make_batch):
    assert "differ from its single samples" in examine(Batched(make_batch)).trouble


def test_batches_found_behind_a_wrapper_are_seen():
    assert "differ from its single samples" in examine(Forwarding(Batched(list))).trouble


def test_a_batch_that_draws_random_numbers_is_seen():
    drawing = Batched(lambda batch: [sample + 0 * torch.rand(1) for sample in batch])

    assert "a batch that the data set makes as a whole draws random" in examine(drawing).trouble
