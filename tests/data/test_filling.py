import itertools

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from flatout.data import threads
from flatout.data.filling import FillingCollate
from flatout.data.unreadable import Log, UnreadableError, left_out
from flatout.techniques.data.thread_loader import load_in_threads
from tests.data.broken import (
    BAD,
    CUT,
    GONE,
    TEXT,
    BySimplejpeg,
    FromBytes,
    FromFiles,
    Generated,
    InBatches,
    OneByOne,
    Opened,
    broken_photographs,
)
from tests.data.photographs import photograph

SETS = [Opened, FromFiles, FromBytes, InBatches]


@pytest.fixture
def paths(tmp_path):
    return broken_photographs(tmp_path)


def filling(dataset, batch_size=4, share=0.5, length="known", **more):
    """Return a loader that fills its batches, an epoch of it begun, and its log."""
    loader = DataLoader(dataset, batch_size, **more)
    plan = FillingCollate(loader.collate_fn, Log(), 0, share)
    loader.collate_fn = plan
    plan.begin_epoch(len(dataset) if length == "known" else length)
    return loader, plan.log


def labels(loader):
    return [batch[1].tolist() for batch in loader]


FILLED = [[0, 1, 2, 0], [4, 5, 6, 7], [8, 10, 10, 11], [12, 13, 15, 15], [16, 17, 18, 19]]
"""Place 3 takes the first of three, place 1 the second, place 2 the third."""


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", SETS)
def test_the_places_of_what_cannot_be_read_are_filled_from_the_batch(kind, workers, paths):
    loader, log = filling(kind(paths), num_workers=workers)

    batches = list(loader)

    assert [batch[1].tolist() for batch in batches] == FILLED
    assert all(
        torch.equal(picture, kind(paths)[label][0])
        for pictures, numbers in batches
        for picture, label in zip(pictures, numbers.tolist(), strict=True)
    )
    assert left_out(log.read()[0]).count == 3


def test_simplejpegs_own_error_is_known(paths):
    loader, log = filling(BySimplejpeg(paths))

    found = labels(loader)

    missed = left_out(log.read()[0])
    assert missed.count == 3
    assert not {TEXT, GONE, CUT} & {label for batch in found for label in batch}
    assert any(error.startswith("ValueError") for _, error in missed.names)


@pytest.mark.parametrize("start", ["fork", "spawn", "forkserver"])
def test_workers_of_every_kind_count_in_one_place(start, paths):
    loader, log = filling(Opened(paths), num_workers=2, multiprocessing_context=start)

    assert labels(loader) == FILLED

    missed = left_out(log.read()[0])
    assert missed.by_process == {"worker 0": 2, "worker 1": 1}
    assert {name for name, _ in missed.names} == {repr(paths[bad]) for bad in BAD}


def test_threads_of_a_worker_leave_the_same_out(paths, monkeypatch):
    monkeypatch.setattr(threads, "times_faster", lambda *_, **__: 2.0)
    loader, log = filling(Opened(paths))

    load_in_threads(loader, 3)

    assert labels(loader) == FILLED
    assert left_out(log.read()[0]).by_process == {"worker 0": 3}


def test_filling_that_comes_after_threads_leaves_the_same_out(paths, monkeypatch):
    monkeypatch.setattr(threads, "times_faster", lambda *_, **__: 2.0)
    readable = [path for number, path in enumerate(paths) if number not in BAD]
    loader = load_in_threads(DataLoader(Opened(readable), 4), 3)
    loader.dataset.paths = paths
    loader = DataLoader(loader.dataset, 4, num_workers=1, collate_fn=loader.collate_fn)
    plan = FillingCollate(loader.collate_fn, Log(), 0, 0.5)
    loader.collate_fn = plan
    plan.begin_epoch(20)

    assert labels(loader) == FILLED
    assert left_out(plan.log.read()[0]).count == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_without_broken_files_are_the_same_to_the_bit(workers, tmp_path):
    whole = [str(photograph(tmp_path, number)) for number in range(11)]
    torch.manual_seed(0)
    plain = list(DataLoader(Opened(whole), 4, shuffle=True, num_workers=workers))

    torch.manual_seed(0)
    loader, log = filling(Opened(whole), shuffle=True, num_workers=workers)
    found = list(loader)

    assert len(found) == len(plain)
    for ours, theirs in zip(found, plain, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
    assert left_out(log.read()[0]).count == 0


class Mistaken(Opened):
    def __getitem__(self, index):
        if index == 5:
            raise KeyError("label")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_mistake_beside_a_broken_file_still_ends_it(workers, paths):
    loader, _ = filling(Mistaken(paths), batch_size=6, num_workers=workers)

    with pytest.raises(KeyError, match="label"):
        labels(loader)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_first_batch_of_nothing_else_ends_it(workers, tmp_path):
    loader, _ = filling(Opened(["/no/such/a.jpg"] * 8), num_workers=workers)

    with pytest.raises(UnreadableError, match="none of the 4 samples of the first batch"):
        labels(loader)


def test_a_worker_that_begins_with_a_broken_file_takes_what_another_one_read(paths):
    loader, log = filling(Opened(paths), batch_size=1, sampler=[0, 1, 2, 4], num_workers=1)
    assert labels(loader) == [[0], [1], [2], [4]]

    again = DataLoader(loader.dataset, 1, sampler=[TEXT, 5], collate_fn=loader.collate_fn)

    assert labels(again) == [[0], [5]]
    assert left_out(log.read()[0]).count == 1


def test_a_collation_that_needs_two_samples_hides_no_broken_file(paths):
    def pairs(samples):
        return samples[0][0], torch.tensor([samples[1][1], samples[0][1]])

    loader, log = filling(Opened(paths), batch_size=2, sampler=[0, 1, 2, TEXT], collate_fn=pairs)

    assert labels(loader) == [[1, 0], [2, 2]]
    assert left_out(log.read()[0]).count == 1


def test_a_loader_that_is_iterated_once_for_all_epochs_is_judged_by_what_was_read(paths):
    order = ([TEXT] + [0] * 199) * 12
    loader, log = filling(Opened(paths), batch_size=200, sampler=order, share=0.01, length=200)

    labels(loader)

    assert left_out(log.read()[0]).count == 12


def test_a_later_batch_of_nothing_else_is_filled_from_the_one_before(paths):
    order = [0, 1, CUT, TEXT, 4, 5]
    loader, log = filling(Opened(paths), batch_size=2, sampler=order)

    assert labels(loader) == [[0, 1], [0, 1], [4, 5]]
    assert left_out(log.read()[0]).count == 2


@pytest.mark.parametrize("workers", [0, 2])
def test_more_than_the_share_of_an_epoch_ends_it(workers, paths):
    loader, _ = filling(Opened(paths), share=0.1, num_workers=workers)

    with pytest.raises(UnreadableError, match=r"3 of 20 samples of an epoch .*most_share=0\.1"):
        labels(loader)


def test_one_file_is_allowed_however_small_the_set(paths):
    loader, log = filling(Opened(paths[:TEXT]), share=0.01)

    labels(loader)

    assert left_out(log.read()[0]).count == 1


def test_each_epoch_is_counted_for_itself(paths):
    loader, log = filling(Opened(paths), share=0.15, num_workers=2, persistent_workers=True)

    for _ in range(3):
        labels(loader)
        loader.collate_fn.begin_epoch(20)

    assert left_out(log.read()[0]).count == 9


def test_a_sampler_of_batches_may_give_them(paths):
    order = BatchSampler(SequentialSampler(range(20)), 4, drop_last=False)
    loader = DataLoader(Opened(paths), batch_sampler=order)
    plan = FillingCollate(loader.collate_fn, Log(), 0, 0.5)
    loader.collate_fn = plan

    assert labels(loader) == FILLED


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_with_its_next_sample(workers, paths):
    loader, log = filling(OneByOne(paths), length=None, num_workers=workers)

    found = labels(loader)

    assert sorted(label for batch in found for label in batch) == [
        number for number in range(20) if number not in BAD
    ]
    assert left_out(log.read()[0]).count == 3


def test_a_generator_that_raised_cannot_go_on_and_says_so(paths):
    loader, _ = filling(Generated(paths), length=None)

    with pytest.raises(UnreadableError, match="an error ends a generator") as raised:
        labels(loader)
    assert "sample 3 of Generated" in str(raised.value)


class Shards(IterableDataset):
    """Reads one shard after the other, each with a generator."""

    def __init__(self, *shards):
        self.shards = shards

    def __iter__(self):
        return itertools.chain.from_iterable(iter(Generated(shard)) for shard in self.shards)


def test_the_rest_of_a_shard_is_not_lost_in_silence(paths):
    loader, _ = filling(Shards(paths[:6], paths[6:]), length=None)

    with pytest.raises(UnreadableError, match="an error ends a generator"):
        labels(loader)


def test_a_stream_whose_first_samples_cannot_be_read_ends_it():
    loader, _ = filling(OneByOne(["/no/such/a.jpg"] * 8), length=None)

    with pytest.raises(UnreadableError, match="none of the first 4 samples"):
        labels(loader)


def test_a_stream_with_many_broken_files_ends(paths):
    loader, _ = filling(OneByOne([paths[0]] * 4 + [paths[TEXT]] * 30), share=0.01, length=None)

    with pytest.raises(UnreadableError, match="11 of 1000 samples"):
        labels(loader)
