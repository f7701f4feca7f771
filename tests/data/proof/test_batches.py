"""Proofs on a loader's first batch: the script's own way is gone once for all of them."""

import multiprocessing

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.data.proof.batches import compare_first_batches, first_batch

MADE = multiprocessing.Value("i", 0)
"""How often a first sample was made, over all processes; no part of the data set's state."""


class Counted(Dataset):
    """It counts how often its first sample is made."""

    def __init__(self):
        self.factor = 1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        with MADE:
            MADE.value += not index
        return torch.rand(()) + self.factor * index


def loader_of(workers):
    return DataLoader(Counted(), batch_size=4, num_workers=workers)


def prove(loader, other=None):
    """Return the trouble of one proof, and how often the first sample was made for it."""
    before = MADE.value

    def way():
        batch = other() if other else first_batch(loader, loader.collate_fn)
        return batch, []

    proof = compare_first_batches(loader, way)
    return proof.trouble, MADE.value - before


def test_proofs_that_follow_each_other_go_the_script_s_way_once():
    loader = loader_of(2)

    assert [prove(loader) for _ in range(3)] == [("", 2), ("", 1), ("", 1)]


def test_another_batch_is_found_by_the_later_proofs_too():
    loader = loader_of(2)
    prove(loader)

    trouble, made = prove(loader, other=lambda: torch.zeros(4))

    assert "differ" in trouble
    assert made == 0


@pytest.mark.parametrize("change", ["streams", "set", "collate"])
def test_it_is_gone_again_where_anything_changed(change):
    loader = loader_of(2)
    prove(loader)

    if change == "streams":
        torch.rand(())
    elif change == "set":
        loader.dataset.factor = 2
    else:
        loader.collate_fn = torch.stack

    assert prove(loader) == ("", 2)


def test_without_workers_nothing_is_taken_over():
    loader = loader_of(0)  # a way that was proven is swapped in here by now

    assert [prove(loader) for _ in range(2)] == [("", 2), ("", 2)]
