"""What is kept of steps of which only the end is noted: the same as if each had been recorded."""

import pytest

from flatout.agent.events import LoaderSeen
from flatout.agent.hooks.step import MARKED
from flatout.agent.session import Session
from flatout.agent.step_sampler import FROM, SHORT_S
from flatout.records.phase_clock import DATA_WAIT, EVAL, FORWARD, OTHER, SAVE, Clock
from flatout.records.trial_spec import TrialSpec

STEP_S = 0.002
BATCH = 32


class Training:
    """A session on a clock of its own, driven as the hook points drive it."""

    def __init__(self):
        self.moment = 100.0
        self.session = Session(TrialSpec(rests_below_s=SHORT_S))
        self.session.clock = Clock(lambda: self.moment)
        self.session.loaders["a"] = LoaderSeen("a", {"effective_workers": 0}, is_training=True)
        self.session.last_loader, self.session.last_size = "a", BATCH
        self.noted = 0

    def step(self, *, batches=1, inside=None, who=0):
        """Draw, train, and end a step; spend half of it in another phase if asked to."""
        session = self.session
        for _ in range(batches):
            if session.rest_left:
                session.drawn += 1
            else:
                session.segment.batches += 1
                session.segment.samples += BATCH
                session.loaders["a"].batches += 1
        self.moment += STEP_S / 2
        if not session.rest_left:
            session.clock.push(FORWARD)
            session.clock.pop()
        if inside is not None:
            session.clock.push(inside)
            session.segment.evals += inside == EVAL
            self.moment += STEP_S
            session.clock.pop()
        self.moment += STEP_S / 2
        if session.rest_left and session.nap.noted():
            self.noted += 1
        else:
            session.end_segment(who)


@pytest.fixture
def training():
    return Training()


def test_noted_steps_have_their_lengths_ends_and_batches(training):
    for _ in range(200):
        training.step()
    training.session.wake()

    segments = training.session.segments
    assert training.noted > 100
    assert len(segments) == training.session.counts[0] == 200
    for number, segment in enumerate(segments, 1):
        assert sum(segment.seconds) == pytest.approx(STEP_S)
        assert segment.end == pytest.approx(100.0 + number * STEP_S)
        assert (segment.batches, segment.samples, segment.who) == (1, BATCH, 0)
    assert training.session.loaders["a"].batches == 200


@pytest.mark.parametrize("inside", [EVAL, SAVE])
def test_a_resting_step_that_evaluates_or_saves_says_so_and_its_neighbours_do_not(training, inside):
    unusual = {FROM + 9, FROM + 10, FROM + 40, FROM + 41, FROM + 42, FROM + 43, FROM + 44}
    for number in range(100):
        training.step(inside=inside if number in unusual else None)
    training.session.wake()

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
    training.session.wake()

    assert [segment.batches for segment in training.session.segments] == wanted
    assert training.session.loaders["a"].batches == sum(wanted)


def test_an_epoch_s_first_batch_is_counted_once_and_another_loader_s_batches_are_its_own(training):
    session = training.session
    session.loaders["b"] = LoaderSeen("b", {})
    evaluations = 0
    for number in range(200):
        if number % 23 == 20:  # an evaluation of four batches; its first one is drawn in full
            session.clock.push(DATA_WAIT)
            session.clock.pop()
            session.segment.batches += 1
            session.loaders["b"].batches += 1
            if session.rest_left:
                session.nap.turn_to(session.loaders["b"], 8)
                session.drawn += 3
            else:
                session.segment.batches += 3
                session.loaders["b"].batches += 3
            evaluations += 1
        training.step(batches=0 if number % 23 == 20 else 1)
    session.wake()

    assert session.loaders["b"].batches == 4 * evaluations
    assert session.loaders["a"].batches == 200 - evaluations
    assert [s.batches for s in session.segments] == [
        4 if number % 23 == 20 else 1 for number in range(200)
    ]


def test_listeners_hear_of_every_step_once_and_in_order(training):
    told = []
    training.session.on("segment", told.append)

    for _ in range(300):
        training.step()

    assert told == training.session.segments[: len(told)]
    assert len(told) > 280


def test_the_script_s_own_marks_begin_anew_in_the_middle_of_a_rest(training):
    session = training.session
    while training.noted < 3:
        training.step()

    session.is_marked = True
    session.forget()
    for _ in range(20):
        training.step(who=MARKED)

    assert session.counts == {MARKED: 20}
    assert [segment.who for segment in session.segments] == [MARKED] * 20
    assert all(segment.is_whole for segment in session.segments)


def test_where_each_end_is_waited_for_none_is_only_noted(training):
    training.session.on("lap", lambda _: None)

    for _ in range(100):
        training.step()

    assert training.noted == 0
    assert len(training.session.segments) == 100
