import pickle

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from flatout.data.caching import ByteStore, cached, fill, is_cached, store_of
from flatout.records.errors import NotApplicable


class Squares(Dataset):
    def __init__(self, length=30):
        self.length = length
        self.made = []

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.made.append(index)
        return {"x": torch.full((4,), float(index**2)), "y": index}


class Batched(Squares):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


def kept(dataset, budget_bytes=1_000_000):
    return cached(dataset, ByteStore(slots=200, budget_bytes=budget_bytes))


def batches(dataset, **options):
    loader = DataLoader(dataset, batch_size=7, **options)
    return [(batch["x"].tolist(), batch["y"].tolist()) for _ in range(2) for batch in loader]


@pytest.mark.parametrize("kind", [Squares, Batched])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_and_without_workers(kind, workers):
    expected = batches(kind())

    assert batches(kept(kind()), num_workers=workers) == expected


@pytest.mark.parametrize("kind", [Squares, Batched])
def test_each_sample_is_made_once(kind):
    source = kind()

    batches(kept(source))

    assert sorted(source.made) == list(range(30))


def test_samples_made_by_workers_are_there_for_everybody():
    source = Squares()
    data = kept(source)

    batches(data, num_workers=2)
    data[3]

    assert source.made == []
    assert store_of(data).count == 30


class RarelyRandom(Squares):
    """One of which few samples are augmented, as those of a rare class."""

    def __getitem__(self, index):
        return torch.rand(()) if index == 7 else torch.tensor(index)


class RarelyRandomBatched(RarelyRandom, Batched):
    pass


@pytest.mark.parametrize("kind", [RarelyRandom, RarelyRandomBatched])
def test_a_sample_that_draws_is_never_kept(kind):
    data = kept(kind())

    first, again = (data.__getitems__([0, 1]) + data.__getitems__([6, 7]) for _ in range(2))

    assert first[:3] == again[:3]
    assert first[3] != again[3]
    assert store_of(data).count >= 2


def test_what_does_not_fit_is_made_anew_and_is_right():
    source = Squares()

    found = batches(kept(source, budget_bytes=1_000))

    assert found == batches(Squares())
    assert 30 < len(source.made) < 60


def test_it_looks_like_the_set_it_stands_for():
    source = Squares()
    data = kept(source)
    source.classes = ["a", "b"]

    assert isinstance(data, Squares)
    assert data.classes == ["a", "b"]
    assert len(data) == 30
    assert is_cached(data)
    assert not is_cached(source)


def test_it_survives_pickling_with_its_store():
    data = kept(Squares())
    data[5]

    again = pickle.loads(pickle.dumps(data))

    assert torch.equal(again[5]["x"], data[5]["x"])
    assert store_of(again).count == 1


def test_a_subset_is_kept_by_its_own_numbers():
    data = kept(Subset(Squares(), [4, 2]))

    assert [data[i]["y"] for i in (0, 1, 0)] == [4, 2, 4]


def test_processes_fill_the_store_beforehand():
    source = Squares()
    data = kept(source)

    fill(data.__getitem__, 30, processes=2, limit_s=10)

    assert store_of(data).count == 30


def test_a_plain_list_cannot_be_stood_in_for():
    with pytest.raises(NotApplicable, match="list"):
        kept([1, 2, 3])


@pytest.mark.parametrize("index", [-4, -5])
def test_an_index_before_the_first_is_refused_by_the_set_alone(index):
    class Letters(Squares):
        def __getitem__(self, index):
            return "abc"[index]

    data = kept(Letters(3))

    assert data[-3] == "a"
    with pytest.raises(IndexError):
        data[index]
    assert store_of(data).count == 1
