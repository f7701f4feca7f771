import random

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.core.errors import NotApplicable
from flatout.data import store
from flatout.data.cached import store_of
from flatout.techniques.data.pretokenized import Pretokenized
from tests.data.texts import Texts, Tokenizer
from tests.techniques.data.samples import Numbers, Stream
from tests.techniques.facts import loader, machine, profile

PROMISE = "asked of the guard in tests/data/test_levers_in_trials.py"


class Masked(Texts):
    """Tokens that are masked at random, as for a masked language model."""

    def __getitem__(self, index):
        sample = super().__getitem__(index)
        sample["input_ids"][random.randrange(3)] = 0
        return sample


class Collator:
    def __init__(self):
        self.tokenizer = Tokenizer()

    def __call__(self, samples):
        return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_bit_by_bit(workers):
    asked = {"dataset": Texts(), "batch_size": 4, "num_workers": workers}

    built = DataLoader(**Pretokenized().loader(asked))
    Pretokenized().epoch(built)
    found = list(built)

    assert store_of(built.dataset).count == 24
    for batch, expected in zip(found, DataLoader(**asked), strict=True):
        assert all(torch.equal(batch[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"dataset": Numbers()}, "holds no tokenizer"),
        ({"dataset": Numbers(), "collate_fn": Collator()}, "collate_fn tokenises"),
        ({"dataset": Masked()}, "draws random numbers"),
        ({"dataset": Stream()}, "iterable"),
    ],
)
def test_loaders_for_which_there_is_nothing_to_keep(asked, words):
    with pytest.raises(NotApplicable, match=words):
        Pretokenized().loader(asked)


def test_spawned_workers_that_would_not_find_the_store_are_left_alone(monkeypatch, tmp_path):
    monkeypatch.setattr(store, "DESCRIPTORS", tmp_path / "none")  # as on macOS
    asked = {"dataset": Texts(), "num_workers": 2, "multiprocessing_context": "spawn"}

    with pytest.raises(NotApplicable, match="spawned workers find the kept samples through"):
        Pretokenized().loader(asked)


def waiting(place):
    return profile(phases_ms={"data_wait": 50.0}, loaders=(loader(tokenizes=place),))


def test_it_is_offered_where_the_step_waits_for_a_tokenizer():
    assert Pretokenized.candidates(waiting("data set"), machine()) == [Pretokenized()]
    assert Pretokenized.candidates(waiting("collate_fn"), machine()) == ()
    assert (
        Pretokenized.candidates(profile(loaders=(loader(tokenizes="data set"),)), machine()) == ()
    )
    assert Pretokenized().predict(waiting("data set"), machine()).step_ms < -45


def test_a_time_without_sense_is_refused():
    with pytest.raises(ValueError, match="fill_s"):
        Pretokenized(fill_s=-1)
