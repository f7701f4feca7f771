import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import flatout.data
from flatout.data.packed_store import PackedStore
from flatout.data.sampler import BlockSampler, GlobalOrder, OrderOptions, reading_ahead
from flatout.records.errors import UserError
from tests.data.packs import packed


class Numbers:
    def __len__(self):
        return 103

    def __getitem__(self, index):
        return int(index)


def order(batch_size=10, **options):
    return GlobalOrder(103, batch_size, OrderOptions(**options))


def numbers(batches):
    return [batch.tolist() for batch in batches]


def test_every_sample_comes_once_in_each_epoch_and_epochs_differ():
    found = order()

    first, second = (list(itertools.chain(*found)) for _ in range(2))

    assert sorted(first) == sorted(second) == list(range(103))
    assert first != second


@pytest.mark.parametrize("drop_last", [True, False])
def test_the_length_is_the_number_of_batches(drop_last):
    found = order(drop_last=drop_last)

    assert len(found) == len(list(found)) == (10 if drop_last else 11)


@pytest.mark.parametrize("ranks", [1, 2, 5, 10])
def test_global_batches_are_the_same_for_any_number_of_ranks(ranks):
    options = [{"rank": rank, "world_size": ranks, "drop_last": True} for rank in range(ranks)]

    parts = [list(order(**one)) for one in options]

    whole = [sorted(itertools.chain(*batch)) for batch in zip(*parts, strict=True)]
    assert whole == [sorted(batch) for batch in order(drop_last=True)]
    assert {len(batch) for part in parts for batch in part} == {10 // ranks}


@pytest.mark.parametrize(
    ("batch_size", "options", "words"),
    [
        (10, {"world_size": 3}, "cannot be shared by 3 ranks"),
        (10, {"world_size": 5}, "3 samples for 5 ranks.*drop_last=True"),
    ],
)
def test_batches_that_ranks_would_hang_on_are_refused(batch_size, options, words):
    with pytest.raises(UserError, match=words):
        order(batch_size, **options)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stop", [1, 4, 11, 15])
def test_training_goes_on_where_it_was_whatever_was_drawn_ahead(workers, stop):
    def batches(found, epochs):
        loader = DataLoader(Numbers(), batch_sampler=found, num_workers=workers)
        for _ in range(epochs):
            yield from found.follow(loader)

    whole = numbers(batches(order(seed=3), 2))

    first = order(seed=3)
    before = numbers(itertools.islice(batches(first, 2), stop))
    state = first.state_dict()
    second = order(seed=3)
    second.load_state_dict(state)
    after = numbers(batches(second, 1 if stop >= 11 and state["epoch"] else 2))

    assert before + after == whole
    assert set(state) == {"seed", "samples", "batch_size", "block", "window", "epoch", "next_batch"}
    assert all(type(value) is int for value in state.values())


class Counted(Numbers):
    """Notes which samples are made."""

    def __init__(self):
        self.made = []

    def __getitem__(self, index):
        self.made.append(int(index))
        return super().__getitem__(index)


@pytest.mark.parametrize("stop", [0, 1, 9, 10])
def test_no_sample_that_was_trained_on_is_made_again_to_get_there(stop):
    whole = [list(map(int, batch)) for batch in order(seed=3)]
    data, resumed = Counted(), order(seed=3)

    resumed.load_state_dict({"seed": 3, "epoch": 0, "next_batch": stop})
    assert data.made == []
    list(resumed.follow(DataLoader(data, batch_sampler=resumed)))

    assert data.made == list(itertools.chain(*whole[stop:]))


def test_no_record_of_a_store_that_was_trained_on_is_read_again_to_get_there(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text("\n".join(f'{{"text": "{"x" * n}"}}' for n in range(103)))
    packed(tmp_path / "a.jsonl", tmp_path / "a")
    read, plain = [], PackedStore.record
    monkeypatch.setattr(
        PackedStore, "record", lambda self, place: read.append(place) or plain(self, place)
    )
    data, resumed = flatout.data.open(tmp_path / "a", decode="bytes"), order(seed=3)

    resumed.load_state_dict({"seed": 3, "epoch": 7, "next_batch": 10})
    list(resumed.follow(DataLoader(data, batch_sampler=resumed)))

    assert read == OrderOptions(seed=3).places(103, epoch=7)[100:].tolist()


def test_a_checkpoint_of_another_seed_is_refused():
    with pytest.raises(UserError, match="has seed 3, this one 0"):
        order().load_state_dict(order(seed=3).state_dict())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (GlobalOrder(103, 20), "has batch_size 20, this one 10"),
        (GlobalOrder(104, 10), "has samples 104, this one 103"),
        (GlobalOrder(103, 10, OrderOptions(block=8)), "has block 8, this one 0"),
    ],
)
def test_a_checkpoint_of_other_batches_or_another_data_set_is_refused(other, words):
    next(iter(other.follow(DataLoader(range(200), batch_sampler=other))))

    with pytest.raises(UserError, match=words):
        order().load_state_dict(other.state_dict())


def test_a_block_order_of_other_windows_is_refused():
    narrow, wide = (order(block=8, window=window) for window in (4096, 8192))

    with pytest.raises(UserError, match="has window 8192, this one 4096"):
        narrow.load_state_dict(wide.state_dict())


def test_an_epoch_may_begin_with_another_batch_size():
    whole, small = order(20), order(10)
    list(whole)

    small.load_state_dict(whole.state_dict())

    assert sorted(itertools.chain(*small)) == list(range(103))
    assert small.epoch == 2


def test_a_checkpoint_that_says_its_seed_alone_is_taken():
    found = order(seed=3)

    found.load_state_dict({"seed": 3, "epoch": 2, "next_batch": 4})

    assert (found.epoch, found.next_batch) == (2, 4)


def test_a_rank_outside_the_world_is_refused():
    with pytest.raises(ValueError, match="between 0 and 1"):
        OrderOptions(rank=2, world_size=2)


def test_the_global_streams_are_left_alone():
    random.seed(1), torch.manual_seed(1)
    before = random.getstate(), torch.get_rng_state()

    list(order())

    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])


@pytest.mark.parametrize("order", ["source", "stored"])
def test_block_order_draws_each_sample_once_where_some_were_left_out(tmp_path, order):
    lines = [f'{{"n": {n}}}' for n in range(100)]
    lines[5] = "damaged"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    packed(tmp_path / "a.jsonl", tmp_path / "a", on_bad="skip")
    data = flatout.data.open(tmp_path / "a", order=order)
    options = OrderOptions(block=8)

    found = list(BlockSampler(data.store, options, is_reordered=data.is_reordered))

    stored = flatout.data.open(tmp_path / "a")
    assert sorted(found) == list(range(99))
    assert [data[n]["n"] for n in found] == [stored[p]["n"] for p in options.places(99, 0)]


@given(st.lists(st.integers(0, 300), max_size=5), st.integers(1, 4))
def test_ranks_share_windows_slot_by_slot_and_each_is_asked_for_before_it_begins(sizes, ranks):
    order = np.random.default_rng(0).permutation(sum(sizes))
    windows = np.split(order, np.cumsum(sizes)[:-1]) if sizes else []
    for rank in range(ranks):
        asked, known, found, was_asked = [], set(), [], []

        def want(places, asked=asked, known=known):
            asked.extend(places.tolist())
            known.update(places.tolist())

        for place in reading_ahead(windows, want, want, OrderOptions(rank=rank, world_size=ranks)):
            was_asked.append(place in known)
            found.append(place)

        assert found == order.tolist()[rank::ranks]
        assert all(was_asked)
        # In the order in which they are stored, window by window; each once.
        whole = [number for window in windows for number in sorted(window.tolist())]
        assert asked == whole


def test_the_example_of_the_global_order_runs():
    example = next(line for line in GlobalOrder.__doc__.splitlines() if "GlobalOrder(len" in line)
    names = {"GlobalOrder": GlobalOrder, "OrderOptions": OrderOptions, "data": Numbers()}

    exec(example.strip(), names)

    assert len(names["order"]) == 1
