"""Which steps are sampled, and what is kept of the others: the same as if each were recorded."""

import itertools

import pytest

from flatout.agent.hooks.step import MARKED
from flatout.agent.session import Session
from flatout.agent.step_sampler import (
    ALL_AT_FIRST,
    MAX_NOTED,
    MAX_SKIPPED,
    MIN_SKIPPED,
    SHORT_STEP_S,
)
from flatout.records.phase_clock import DATA_WAIT, EVAL, FORWARD, OTHER, SAVE, Clock
from flatout.records.trial_result import LoaderSeen
from flatout.records.trial_spec import TrialSpec

STEP_S = 0.002
BATCH = 32


class Training:
    """A session on a clock of its own, driven as the hook points drive it."""

    def __init__(self):
        self.moment = 100.0
        self.session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))
        self.session.clock = Clock(lambda: self.moment)
        self.session.loaders["a"] = LoaderSeen("a", {"effective_workers": 0}, is_training=True)
        self.sources = {}
        self.noted = 0

    def draw(self, name="a", size=BATCH):
        """Draw a batch of a loader's only epoch."""
        session, sampler = self.session, self.session.sampler
        source = self.sources.setdefault(name, lambda: name)
        if sampler.skips_left and sampler.source is source:
            sampler.drawn += 1
            return
        session.clock.push(DATA_WAIT)
        session.clock.pop()
        sampler.change_source(source, session.loaders[name], size)
        session.segment.batches += 1
        session.segment.samples += size
        session.loaders[name].batches += 1

    def step(self, *, batches=1, inside=None, who=0):
        """Draw, train, and end a step; spend half of it in another phase if asked to."""
        session = self.session
        for _ in range(batches):
            self.draw()
        self.moment += STEP_S / 2
        if not session.sampler.skips_left:
            session.clock.push(FORWARD)
            session.clock.pop()
        if inside is not None:
            session.clock.push(inside)
            session.segment.evals += inside == EVAL
            self.moment += STEP_S
            session.clock.pop()
        self.moment += STEP_S / 2
        if session.sampler.skips_left and session.sampler.note_end():
            self.noted += 1
        else:
            session.end_segment(who)


@pytest.fixture
def training():
    return Training()


def test_noted_steps_have_their_lengths_ends_and_batches(training):
    for _ in range(200):
        training.step()
    training.session.record_noted()

    segments = training.session.segments
    assert training.noted > 100
    assert len(segments) == training.session.counts[0] == 200
    for number, segment in enumerate(segments, 1):
        assert sum(segment.seconds) == pytest.approx(STEP_S)
        assert segment.end == pytest.approx(100.0 + number * STEP_S)
        assert (segment.batches, segment.samples, segment.who) == (1, BATCH, 0)
    assert training.session.loaders["a"].batches == 200


@pytest.mark.parametrize("inside", [EVAL, SAVE])
def test_a_skipped_step_that_evaluates_or_saves_says_so_and_its_neighbours_do_not(training, inside):
    unusual = {
        ALL_AT_FIRST + 9,
        ALL_AT_FIRST + 10,
        ALL_AT_FIRST + 40,
        ALL_AT_FIRST + 41,
        ALL_AT_FIRST + 42,
        ALL_AT_FIRST + 43,
        ALL_AT_FIRST + 44,
    }
    for number in range(100):
        training.step(inside=inside if number in unusual else None)
    training.session.record_noted()

    assert training.noted > 30
    for number, segment in enumerate(training.session.segments):
        extra_s = STEP_S if number in unusual else 0.0
        assert segment.seconds[inside] == pytest.approx(extra_s)
        assert sum(segment.seconds) == pytest.approx(STEP_S + extra_s)
        assert segment.seconds[OTHER] == pytest.approx(STEP_S)


def test_accumulated_batches_belong_to_their_own_steps(training):
    wanted = [1 + number % 3 for number in range(100)]
    for batches in wanted:
        training.step(batches=batches)
    training.session.record_noted()

    assert [segment.batches for segment in training.session.segments] == wanted
    assert training.session.loaders["a"].batches == sum(wanted)


def test_an_epoch_s_first_batch_is_counted_once_and_another_loader_s_batches_are_its_own(training):
    session = training.session
    session.loaders["b"] = LoaderSeen("b", {})
    evaluations = [number for number in range(200) if number % 23 == 20]
    for number in range(200):
        if number in evaluations:  # in the midst of an epoch, between two batches of it
            for _ in range(4):
                training.draw("b", size=8)
        training.step()
    session.record_noted()

    assert training.noted > 100
    assert session.loaders["b"].batches == 4 * len(evaluations)
    assert session.loaders["a"].batches == 200
    found = [(segment.batches, segment.samples) for segment in session.segments]
    assert found == [
        (5, BATCH + 4 * 8) if number in evaluations else (1, BATCH) for number in range(200)
    ]


def test_listeners_hear_of_every_step_once_and_in_order(training):
    told = []
    training.session.on("segment", told.append)

    for _ in range(300):
        training.step()

    assert told == training.session.segments[: len(told)]
    assert len(told) > 280


def test_the_script_s_own_marks_begin_again_while_steps_are_skipped(training):
    session = training.session
    while training.noted < 3:
        training.step()

    session.is_marked = True
    session.forget()
    for _ in range(20):
        training.step(who=MARKED)

    assert session.counts == {MARKED: 20}
    assert [segment.who for segment in session.segments] == [MARKED] * 20
    assert all(segment.is_sampled for segment in session.segments)


def test_where_each_end_is_waited_for_every_step_is_recorded(training):
    training.session.on("lap", lambda _: None)

    for _ in range(100):
        training.step()

    assert training.noted == 0
    assert len(training.session.segments) == 100


def sampled_of(session, count, *, step_s=0.002, who=0):
    """Make steps of a length; return which of them were sampled."""
    seen = []
    for _ in range(count):
        seen.append(session.segment.is_sampled)
        session.clock.totals[4] += step_s
        session.end_segment(who)
    return seen


def test_one_short_step_in_fifteen_is_sampled_at_no_fixed_distance():
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))

    seen = sampled_of(session, 12_000)

    assert all(seen[:ALL_AT_FIRST])
    sampled = [
        index for index, is_sampled in enumerate(seen) if is_sampled and index > ALL_AT_FIRST
    ]
    assert len(sampled) == pytest.approx(12_000 / 15, rel=0.05)
    gaps = [after - before - 1 for before, after in itertools.pairwise(sampled)]
    assert set(gaps) == {MAX_SKIPPED - 1, MAX_SKIPPED, MAX_SKIPPED + 1}
    for period in (2, 3, 5, 10):
        by_phase = [sum(index % period == p for index in sampled) for p in range(period)]
        assert min(by_phase) > 0.7 * len(sampled) / period


def test_listeners_hear_of_skipped_steps_several_at_a_time():
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))
    told, ended, waiting = [], [], []
    session.on("segment", told.append)
    session.on("lap", ended.append)
    session.on("lap", lambda _: waiting.append(len(ended) - len(told)))

    sampled_of(session, 1_000)

    assert len(ended) == 1_000
    assert told == ended[: len(told)]
    assert len(ended) - len(told) <= MAX_NOTED
    assert max(waiting) in range(MAX_SKIPPED, MAX_NOTED + 2)


@pytest.mark.parametrize(
    ("step_s", "gap"), [(0.04, 7), (0.0499, 6), (0.02, MAX_SKIPPED), (0.1, MIN_SKIPPED)]
)
def test_longer_steps_are_sampled_more_often(step_s, gap):
    seen = sampled_of(Session(TrialSpec(skips_below_s=1.0)), 2_000, step_s=step_s)

    sampled = [
        index for index, is_sampled in enumerate(seen) if is_sampled and index > ALL_AT_FIRST
    ]
    gaps = [after - before - 1 for before, after in itertools.pairwise(sampled)]
    assert sum(gaps) / len(gaps) == pytest.approx(gap, rel=0.05)


def test_long_steps_are_all_sampled():
    assert all(
        sampled_of(Session(TrialSpec(skips_below_s=SHORT_STEP_S)), 100, step_s=1.2 * SHORT_STEP_S)
    )


def test_steps_that_become_long_are_sampled_again():
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))
    sampled_of(session, 100)

    seen = sampled_of(session, 100, step_s=1.2 * SHORT_STEP_S)

    assert all(seen[20:])


@pytest.mark.parametrize("event", ["batch", "forward", "before_step", "after_step"])
def test_who_listens_to_every_step_hears_every_step(event):
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))
    session.on(event, lambda *_: None)

    assert all(sampled_of(session, 100))


def test_without_being_asked_no_step_is_skipped():
    assert all(sampled_of(Session(TrialSpec()), 100))


def test_steps_of_several_optimizers_are_all_sampled():
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))

    assert all(sampled_of(session, 1, who=n % 2)[0] for n in range(100))


class Built:
    """Stands for an optimizer."""


def test_a_training_whose_optimizer_comes_after_another_that_is_gone_is_skipped_too():
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))
    first, second = Built(), Built()
    for each in (first, second):
        session.add_optimizer(each)

    together = [sampled_of(session, 1, who=n % 2)[0] for n in range(50)]
    del first, each
    alone = sampled_of(session, 100, who=1)

    assert all(together)
    assert sum(alone) < 50
    assert {segment.who for segment in session.segments[50:]} == {1}


def test_batches_that_come_in_bursts_are_sampled_in_bursts():
    session = Session(TrialSpec(skips_below_s=SHORT_STEP_S))
    session.loaders["here"] = LoaderSeen("here", {"effective_workers": 3}, is_training=True)
    session.loaders["there"] = LoaderSeen("there", {"effective_workers": 5})

    seen = sampled_of(session, 300)[ALL_AT_FIRST:]

    bursts = "".join("x" if is_sampled else " " for is_sampled in seen).split()
    assert {len(burst) for burst in bursts[1:-1]} == {3}
