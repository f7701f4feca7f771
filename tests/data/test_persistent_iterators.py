"""Several iterators of one loader whose workers live on, and iterators that are left."""

import pytest
import torch
from torch.utils.data import DataLoader

from flatout.techniques.data.persistent_workers import PersistentWorkers
from tests.techniques.data.samples import Augmented, Numbers


class WithTechnique(DataLoader):
    """A loader whose every start of an epoch the technique hears of, as the hook point sees to."""

    def __init__(self, **asked):
        technique = PersistentWorkers()
        super().__init__(**technique.loader(asked))
        self.technique = technique

    def __iter__(self):
        self.technique.epoch(self)
        return super().__iter__()


class Marked(Augmented):
    """Each sample tells a mark that the script sets."""

    mark = 0

    def __getitem__(self, index):
        return torch.cat([super().__getitem__(index), torch.tensor([self.mark])])


def zipped(built):
    return [(one.tolist(), other.tolist()) for one, other in zip(built, built, strict=True)]


def nested(built):
    return [(one.tolist(), [other.tolist() for other in built]) for one in built]


def nested_and_left(built):
    seen = []
    for one in built:
        for other in built:
            seen.append((one.tolist(), other.tolist()))
            break
    return seen


def left_at_once(built):
    seen = []
    for batch in built:
        seen.append(batch.tolist())
        break
    return seen


def begun_twice(built):
    first = iter(built)
    seen = [next(first).tolist()]
    second = iter(built)
    return [*seen, *(batch.tolist() for batch in second), *(batch.tolist() for batch in first)]


def changed_within(built):
    seen = []
    for one in built:
        built.dataset.mark += 1
        seen.append((one.tolist(), [other.tolist() for other in built]))
    return seen


def counted(built):
    """As Lightning, and loops that count: nobody asks for what comes after the last batch."""
    kept = built.__dict__.setdefault("kept", [])
    kept[:] = [iter(built)]
    return [next(kept[0]).tolist() for _ in range(len(built))]


def asked_late(built):
    """The iterator of the epoch before is asked for more beside the next epoch's."""
    before = built.__dict__.get("before")
    built.before = iter(built)
    seen = [next(built.before).tolist() for _ in range(len(built))]
    return [*seen, [batch.tolist() for batch in before or ()]]


def asked_after_its_end(built):
    """The iterator of the epoch before was drawn to its end, and is asked once more."""
    before = built.__dict__.get("before")
    built.before = iter(built)
    seen = [batch.tolist() for batch in built.before]
    return [*seen, [batch.tolist() for batch in before or ()]]


def three_times(built, walk):
    torch.manual_seed(0)
    return [(walk(built), torch.rand(1).item()) for _ in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "walk",
    [
        *(zipped, nested, nested_and_left, left_at_once, begun_twice, changed_within),
        *(counted, asked_late, asked_after_its_end),
    ],
)
def test_iterators_beside_each_other_and_left_ones_are_those_of_a_plain_loader(walk):
    asked = {"num_workers": 2, "batch_size": 5, "shuffle": True}

    expected = three_times(DataLoader(Marked(), **asked), walk)
    lasting = WithTechnique(dataset=Marked(), **asked)

    assert three_times(lasting, walk) == expected


def test_it_says_where_a_second_iterator_needed_workers_of_its_own():
    built = WithTechnique(dataset=Numbers(), num_workers=1, batch_size=5)

    three_times(built, zipped)

    said = "would serve two iterators of the loader at once: they were started again in 3 of 5"
    assert said in built.technique.end()


@pytest.mark.parametrize("walk", [left_at_once, nested_and_left, counted])
def test_workers_live_on_where_an_epoch_was_left(walk):
    asked = {"dataset": Numbers(), "num_workers": 1, "batch_size": 5}
    built = WithTechnique(**asked)

    walk(built)
    before = [worker.pid for worker in built._iterator._workers]
    left_at_once(built)

    assert [worker.pid for worker in built._iterator._workers] == before


def test_the_workers_of_an_iterator_that_was_put_aside_end_with_it():
    asked = {"dataset": Numbers(), "num_workers": 1, "batch_size": 5}
    built = WithTechnique(**asked)
    first = iter(built)
    (worker,) = first._workers
    second = iter(built)
    assert second is not first

    del first
    worker.join(30)

    assert not worker.is_alive()
    assert len(list(second)) == 3


def test_workers_that_went_to_a_successor_end_with_it():
    built = WithTechnique(dataset=Numbers(), num_workers=1, batch_size=5)
    technique = built.technique
    counted(built)
    (worker,) = built._iterator._workers

    counted(built)
    (same,) = built._iterator._workers
    built.kept.clear()
    del built
    worker.join(30)

    assert same is worker
    assert not worker.is_alive()
    assert technique.end() == ""


def test_of_an_iterator_that_was_put_aside_the_workers_end_with_its_batches():
    asked = {"dataset": Numbers(), "num_workers": 1, "batch_size": 5}
    built = WithTechnique(**asked)
    first = iter(built)
    (worker,) = first._workers
    list(built)

    list(first)
    worker.join(30)

    assert not worker.is_alive()
