import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.data import GlobalOrder, Seeded
from flatout.data.sampler import OrderOptions


class Noisy:
    """Each sample draws from the three global streams."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()])


def epochs(seed=0, batch_size=4, **options):
    """Return two epochs, each as a mapping from sample to what it drew."""
    order = GlobalOrder(24, batch_size)
    loader = DataLoader(Seeded(Noisy(), seed), batch_sampler=order, **options)
    return [
        {row[0]: row[1:] for batch in order.follow(loader) for row in batch.tolist()}
        for _ in range(2)
    ]


@pytest.mark.parametrize(
    "options",
    [{"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}, {"batch_size": 6}],
)
def test_what_a_sample_draws_does_not_depend_on_workers_or_batches(options):
    assert epochs(**options) == epochs()


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_a_sample_draws_does_not_depend_on_how_many_ranks_share_an_epoch(ranks):
    together = [{}, {}]
    for rank in range(ranks):
        order = GlobalOrder(24, 12, OrderOptions(rank=rank, world_size=ranks))
        loader = DataLoader(Seeded(Noisy()), batch_sampler=order)
        for drawn in together:
            rows = [row for batch in order.follow(loader) for row in batch.tolist()]
            drawn |= {row[0]: row[1:] for row in rows}

    assert together == epochs()


def test_epochs_seeds_and_samples_draw_differently():
    first, second = epochs()

    assert len(first) == 24
    assert first != second
    assert first != epochs(seed=1)[0]
    assert len({tuple(drawn) for drawn in first.values()}) == 24


def test_without_an_order_of_ours_the_epoch_is_told():
    data = Seeded(Noisy())
    before = data[3].tolist()
    data.set_epoch(1)

    assert data[3].tolist() != before
    data.set_epoch(0)
    assert data[3].tolist() == before
