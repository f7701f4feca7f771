"""How often steps are looked into."""

import itertools

import pytest

from flatout.agent.events import LoaderSeen, Segment
from flatout.agent.session import Session
from flatout.agent.step_sampler import FEWEST, FROM, MOST, SHORT_S, TOLD_TOGETHER
from flatout.records.trial_spec import TrialSpec


def whole_of(session, count, *, step_s=0.002, who=0):
    """Make steps of a length; return which of them were looked into."""
    seen = []
    for _ in range(count):
        seen.append(session.segment.is_whole)
        session.clock.totals[4] += step_s
        session.end_segment(who)
    return seen


def test_one_short_step_in_fifteen_is_looked_into_at_no_fixed_distance():
    session = Session(TrialSpec(rests_below_s=SHORT_S))

    seen = whole_of(session, 12_000)

    assert all(seen[:FROM])
    looked = [index for index, is_whole in enumerate(seen) if is_whole and index > FROM]
    assert len(looked) == pytest.approx(12_000 / 15, rel=0.05)
    gaps = [after - before - 1 for before, after in itertools.pairwise(looked)]
    assert set(gaps) == {MOST - 1, MOST, MOST + 1}
    for period in (2, 3, 5, 10):
        by_phase = [sum(index % period == p for index in looked) for p in range(period)]
        assert min(by_phase) > 0.7 * len(looked) / period


def test_listeners_hear_of_every_step_once_in_order_and_of_several_at_a_time():
    session = Session(TrialSpec(rests_below_s=SHORT_S))
    told, ended, waiting = [], [], []
    session.on("segment", told.append)
    session.on("lap", ended.append)
    session.on("lap", lambda _: waiting.append(len(ended) - len(told)))

    whole_of(session, 1_000)

    assert len(ended) == 1_000
    assert told == ended[: len(told)]
    assert len(ended) - len(told) <= TOLD_TOGETHER
    assert max(waiting) in range(MOST, TOLD_TOGETHER + 2)


@pytest.mark.parametrize(("step_s", "gap"), [(0.04, 7), (0.0499, 6), (0.02, MOST), (0.1, FEWEST)])
def test_longer_steps_are_looked_into_more_often(step_s, gap):
    seen = whole_of(Session(TrialSpec(rests_below_s=1.0)), 2_000, step_s=step_s)

    looked = [index for index, is_whole in enumerate(seen) if is_whole and index > FROM]
    gaps = [after - before - 1 for before, after in itertools.pairwise(looked)]
    assert sum(gaps) / len(gaps) == pytest.approx(gap, rel=0.05)


def test_long_steps_are_all_looked_into():
    assert all(whole_of(Session(TrialSpec(rests_below_s=SHORT_S)), 100, step_s=1.2 * SHORT_S))


def test_steps_that_become_long_are_looked_into_again():
    session = Session(TrialSpec(rests_below_s=SHORT_S))
    whole_of(session, 100)

    seen = whole_of(session, 100, step_s=1.2 * SHORT_S)

    assert all(seen[20:])


@pytest.mark.parametrize("event", ["batch", "forward", "before_step", "after_step"])
def test_who_listens_to_every_step_hears_every_step(event):
    session = Session(TrialSpec(rests_below_s=SHORT_S))
    session.on(event, lambda *_: None)

    assert all(whole_of(session, 100))


def test_without_being_asked_nothing_rests():
    assert all(whole_of(Session(TrialSpec()), 100))


def test_steps_of_several_optimizers_are_told_apart_by_what_is_seen():
    session = Session(TrialSpec(rests_below_s=SHORT_S))

    assert all(whole_of(session, 1, who=n % 2)[0] for n in range(100))


def test_batches_that_come_in_bursts_are_looked_at_in_bursts():
    session = Session(TrialSpec(rests_below_s=SHORT_S))
    session.loaders["here"] = LoaderSeen("here", {"effective_workers": 3})
    session.last_loader = "here"

    seen = whole_of(session, 300)[FROM:]

    bursts = "".join("x" if is_whole else " " for is_whole in seen).split()
    assert {len(burst) for burst in bursts[1:-1]} == {3}


def test_a_segment_says_what_it_is():
    assert Segment().is_whole
