"""What the loader's hook point asks of the script's objects leaves no trace and ends no script."""

import itertools
import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, Subset, dataloader

from flatout.agent import patching
from flatout.agent.hooks import loader as loader_hook
from flatout.agent.session import Session
from flatout.records.phase_clock import DATA_WAIT, Clock
from flatout.records.trial_spec import TrialSpec
from tests.techniques.data.samples import Numbers


@pytest.fixture
def session():
    return Session(TrialSpec())


def watched(session):
    """Return a class of loaders of the script's, with the hook point in it alone."""

    class Loader(DataLoader):
        pass

    loader_hook._Construction(session).install(Loader)
    return Loader


class Rough(IterableDataset):
    """A stream whose length nobody can tell."""

    def __init__(self, error):
        self.error = error

    def __len__(self):
        raise self.error

    def __iter__(self):
        return iter(range(4))


class Short(IterableDataset):
    """A stream that is longer than it says."""

    def __len__(self):
        return 2

    def __iter__(self):
        return iter(range(4))


class Closed(Numbers):
    """A data set that opens what is below it later."""

    @property
    def dataset(self):
        raise ValueError("not open yet")


@pytest.mark.parametrize(
    "error", [TypeError(), ValueError("unknown"), OverflowError(), RuntimeError("not yet")]
)
def test_a_length_that_raises_is_unknown_and_the_loader_is_built(session, error):
    built = watched(session)(Rough(error), batch_size=2)

    assert [batch.tolist() for batch in built] == [[0, 1], [2, 3]]
    (seen,) = session.loaders.values()
    assert (seen.asked["dataset_len"], seen.asked["steps_per_epoch"]) == (None, None)


def test_facts_that_cannot_be_noted_are_told_and_the_loader_is_built(session):
    built = watched(session)(Closed(), batch_size=6)

    assert len(list(built)) == 2
    assert session.loaders == {}
    assert "not open yet" in session.errors[0]


class Equal(Numbers):
    """A data set that equals every other of its class."""

    def __eq__(self, other):
        return isinstance(other, Equal)


def test_a_data_set_that_calls_itself_equal_to_the_one_before_is_used(session, monkeypatch):
    kept = Equal()
    monkeypatch.setattr(session, "transform", lambda _, asked: {**asked, "dataset": kept})

    assert watched(session)(Equal()).dataset is kept


def test_torch_does_not_hold_a_stream_to_a_length_that_only_flatout_asked_for(session):
    built = watched(session)(Short(), batch_size=1)

    assert len(list(built)) == 4  # a warning, which is an error here, would end it
    (seen,) = session.loaders.values()
    assert seen.asked["steps_per_epoch"] == 2


def test_torch_holds_a_stream_to_a_length_that_the_script_asked_for(session):
    built = watched(session)(Short(), batch_size=1)

    assert len(built) == 2
    with pytest.warns(UserWarning, match="was reported to be 2"):
        list(built)


class OfGenerators(DataLoader):
    def _get_iterator(self):
        return (torch.tensor(number) for number in range(3))


class Slots:
    __slots__ = ("left",)

    def __init__(self):
        self.left = [2, 1, 0]

    def __iter__(self):
        return self

    def __next__(self):
        if not self.left:
            raise StopIteration
        return torch.tensor(self.left.pop())


class OfSlots(DataLoader):
    def _get_iterator(self):
        return Slots()


@pytest.mark.parametrize("kind", [OfGenerators, OfSlots])
def test_an_iterator_without_a_place_for_notes_is_handed_out_as_it_is(session, kind):
    built = kind(Numbers())

    batches = loader_hook._Iteration(session).begin(DataLoader.__iter__, built)

    assert [batch.item() for batch in batches] == [0, 1, 2]
    assert session.segment.loader_starts == 1


class Drawing(Sampler):
    """Draws its batches to tell how many there are, as some samplers by length do."""

    def __iter__(self):
        return iter(torch.randperm(12).split(4))

    def __len__(self):
        return len(list(self))


def test_a_length_that_draws_random_numbers_leaves_the_script_s_own_where_they_were(session):
    before = torch.get_rng_state()

    watched(session)(Numbers(), batch_sampler=Drawing())

    assert session.loaders
    assert torch.equal(torch.get_rng_state(), before)


def test_loaders_that_one_line_makes_are_told_apart(session):
    kind, names = watched(session), ("train", "val")
    data = {name: Numbers() for name in names}
    found = []
    for _ in range(3):
        made = {name: kind(data[name], batch_size=6) for name in names}
        found.append([made[name].__dict__[loader_hook.ADDRESS] for name in names])
        for loader in made.values():
            loader.__dict__[loader_hook.USED] = True  # as when it is iterated

    assert found[0][1] == f"{found[0][0]}.1"
    assert found == [found[0]] * 3
    assert [seen.builds for seen in session.loaders.values()] == [3, 3]


def test_a_loader_that_is_made_again_in_each_epoch_keeps_its_address(session):
    kind, loader = watched(session), None
    for _ in range(3):
        loader = kind(Numbers(), batch_size=6)
        loader.__dict__[loader_hook.USED] = True

    assert len(session.loaders) == 1


@pytest.fixture
def listened(session):
    """The class of loaders whose batches are listened to, until the test is over."""
    before = set(patching.patches())
    loader_hook._Iteration(session).install(dataloader)
    yield watched(session)
    for patch in set(patching.patches()) - before:
        patch.undo()


@pytest.mark.parametrize("is_skipped", [False, True])
def test_each_loader_has_its_own_batches_though_epochs_are_within_each_other(
    session, listened, is_skipped
):
    training, held_out = listened(Numbers(), batch_size=1), listened(Numbers(), batch_size=4)
    session.sampler.skips_left = 99 * is_skipped

    for number, _ in enumerate(training):
        if number % 4 == 0:
            list(itertools.islice(held_out, 2))
    iter(training)  # the next epoch: what was drawn is counted by now

    batches = {seen.asked["batch_size"]: seen.batches for seen in session.loaders.values()}
    assert batches == {1: 12, 4: 6}
    assert (session.segment.batches, session.segment.samples) == (18, 36)


class Mixed(IterableDataset):
    """Puts its batches together from those of other loaders."""

    def __init__(self, *loaders):
        self.loaders = loaders

    def __iter__(self):
        return (torch.cat(batches) for batches in zip(*self.loaders, strict=True))


@pytest.mark.parametrize("is_skipped", [False, True])
def test_batches_that_a_data_set_draws_itself_are_parts_of_its_own(session, listened, is_skipped):
    parts = [listened(Numbers(), batch_size=2), listened(Numbers(), batch_size=2)]
    whole = listened(Mixed(*parts), batch_size=None)
    session.sampler.skips_left = 99 * is_skipped

    drawn = list(whole)
    iter(whole)

    assert [len(batch) for batch in drawn] == [4] * 6
    assert (session.segment.batches, session.segment.samples) == (6, 24)
    assert [seen.batches for seen in session.loaders.values()] == [0, 0, 6]


@pytest.mark.parametrize("is_skipped", [False, True])
def test_it_is_noted_how_many_batches_an_epoch_had_that_the_script_left(
    session, listened, is_skipped
):
    loader = listened(Numbers(), batch_size=2)
    session.sampler.skips_left = 99 * is_skipped

    for _ in range(3):
        list(itertools.islice(loader, 4))

    (seen,) = session.loaders.values()
    assert seen.begun_at == [0, 4, 8]


def test_an_epoch_without_a_batch_ends_as_such_though_it_cannot_be_noted(
    session, listened, tmp_path
):
    session.spec = TrialSpec(folder=str(tmp_path))
    loader = listened(Subset(Numbers(), []), num_workers=1, prefetch_factor=np.int64(2))

    assert list(loader) == []
    assert "int64" in session.errors[0]


def test_batches_that_another_thread_draws_are_told(session, listened):
    loader = listened(Numbers(), batch_size=4)

    thread = threading.Thread(target=list, args=(loader,))
    thread.start()
    thread.join()

    assert session.draws_elsewhere
    assert [seen.batches for seen in session.loaders.values()] == [0]


@pytest.mark.parametrize(("takes_s", "waited_s"), [(0.001, 0.0), (0.4, 0.4)])
def test_a_stall_in_a_skipped_step_is_a_wait_and_an_ordinary_batch_is_not_looked_into(
    takes_s, waited_s
):
    moments, iterator = iter([0.0, 0.0, takes_s, takes_s]), Rough(None)
    session = Session(TrialSpec(skips_below_s=0.05))
    session.clock = Clock(lambda: next(moments))
    session.sampler.skips_left, session.sampler.source = 5, lambda: iterator

    loader_hook._Iteration(session).listen(lambda _: "a batch")(iterator)

    assert session.clock.totals[DATA_WAIT] == waited_s
    assert bool(session.clock.changes) is bool(waited_s)
    assert session.sampler.drawn == 1
