import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flatout.techniques.data.thread_loader import batch_threads as module
from flatout.techniques.data.thread_loader.batch_threads import (
    SharedStreams,
    ThreadedCollate,
    find_unshareable,
    own_streams,
    seed_own,
    streams_per_thread,
    times_faster,
)


class Drawing(Dataset):
    """Samples that draw from Python's and numpy's streams, the slow ones first in each batch."""

    def __len__(self):
        return 20

    def __getitem__(self, index):
        drawn = random.random(), np.random.uniform(), random.choice("abc") == "a"
        time.sleep(0.004 if index % 4 == 0 else 0.0)
        return torch.tensor([index, *drawn, random.gauss(0, 1), np.random.randint(9)])


class Failing(Drawing):
    def __getitem__(self, index):
        if index == 6:
            raise KeyError("sample six")
        return super().__getitem__(index)


def batches(dataset, threads, **options):
    random.seed(5)
    torch.manual_seed(5)
    loader = DataLoader(dataset, 5, shuffle=True, **options)
    loader.collate_fn = ThreadedCollate(loader.collate_fn, threads)
    return [batch.tolist() for _ in range(2) for batch in loader]


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"num_workers": 1, "prefetch_factor": 4}])
def test_what_samples_draw_does_not_depend_on_the_number_of_threads(options):
    one, two, four = (batches(Drawing(), n, **options) for n in (1, 2, 4))

    assert one == two == four
    assert len({row[1] for batch in one for row in batch}) == 40


def test_the_order_is_that_of_the_plain_loader():
    torch.manual_seed(5)
    loader = DataLoader(Drawing(), 5, shuffle=True)
    plain = [batch[:, 0].tolist() for _ in range(2) for batch in loader]
    random.seed(5)
    torch.manual_seed(5)
    loader.collate_fn = ThreadedCollate(loader.collate_fn, 3)

    assert [batch[:, 0].tolist() for _ in range(2) for batch in loader] == plain


def test_an_error_arrives_with_its_class_and_words_and_the_loader_goes_on():
    loader = DataLoader(Failing(), 5, num_workers=1)
    loader.collate_fn = ThreadedCollate(loader.collate_fn, 2)
    iterator = iter(loader)

    next(iterator)
    with pytest.raises(KeyError, match="sample six"):
        next(iterator)
    assert next(iterator)[:, 0].tolist() == [10, 11, 12, 13, 14]


def test_a_thread_has_streams_of_its_own_and_others_keep_theirs():
    random.seed(1)
    np.random.seed(1)
    expected = random.Random(1).random(), np.random.RandomState(1).uniform()
    with streams_per_thread():
        with own_streams():
            seed_own(7)
            ours = random.random(), np.random.uniform(), np.random.sample()
        found = random.random(), np.random.uniform()

    again = np.random.RandomState(7)
    assert ours == (random.Random(7).random(), again.uniform(), again.random_sample())
    assert found == expected
    assert random.random.__self__ is module._python()


@pytest.mark.parametrize(
    ("draw", "word"),
    [
        (lambda: torch.rand(1), "torch"),
        (np.random.uniform, "numpy"),
        (random.uniform, "Python"),
    ],
)
def test_a_draw_from_what_threads_share_is_noticed(draw, word):
    streams = SharedStreams()
    random.getrandbits(module.SEED_BITS)
    assert streams.find_moved() == ""

    streams = SharedStreams()
    random.getrandbits(module.SEED_BITS)
    draw(*([0, 1] if word == "Python" else []))
    assert word in streams.find_moved()


def test_what_threads_cannot_share_is_named(tmp_path):
    def holding(**attributes):
        dataset = Drawing()
        vars(dataset).update(attributes)
        return find_unshareable(dataset)

    with (tmp_path / "f").open("wb") as file:
        assert holding(source=Holder(file=file)).startswith("Drawing.source.file is an open file")
    assert "Drawing.rng is a random generator" in holding(rng=np.random.default_rng(0))
    assert "__getitems__" in find_unshareable(torch.utils.data.Subset(Drawing(), [0]))
    assert holding(paths=["a"]) == ""


class Holder:
    def __init__(self, file):
        self.file = file


def test_the_best_round_of_each_counts(monkeypatch):
    moments = iter([0, 4, 4, 14, 20, 26, 30, 32])
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(moments))

    assert times_faster(lambda: None, lambda: None, rounds=2) == 2.0
