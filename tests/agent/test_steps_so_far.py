"""Steps found while a training runs: the same as those found at the end, at every moment."""

import random

import pytest

from flatout.agent.recorder import StepsSoFar
from flatout.analysis.steps import steps_of
from flatout.records.trial_result import Segment


def segments(whos, *, start=0.0):
    found, end = [], start
    for who in whos:
        wall_s = 0.01 + who / 100
        end += wall_s
        found.append(Segment(who=who, seconds=[wall_s, *[0.0] * 6], end=end, batches=1))
    return found


@pytest.mark.parametrize(
    "whos",
    [
        [0] * 40,
        [0, 1] * 20,
        [0, 0, 0, 1] * 10,
        [0] * 20 + [1] * 20,
    ],
    ids=["one", "two in turns", "critic and generator", "one after the other"],
)
def test_each_look_finds_what_the_end_would(whos):
    draws = random.Random(0)
    every, so_far, seen = segments(whos), StepsSoFar(), 0

    while seen < len(every):
        seen = min(len(every), seen + draws.randint(1, 7))
        assert tuple(so_far.of(every[:seen])) == tuple(steps_of(every[:seen]))


def test_segments_that_the_script_s_own_marks_made_void_are_forgotten():
    so_far = StepsSoFar()
    so_far.of(segments([0] * 9))
    own = segments([0] * 12, start=5.0)

    assert tuple(so_far.of(own)) == tuple(steps_of(own))


def test_segments_cut_off_at_the_end_are_forgotten():
    so_far, every = StepsSoFar(), segments([0] * 9)
    so_far.of(every)

    assert len(so_far.of(every[:4])) == 4


def test_no_segments_make_no_steps():
    assert not StepsSoFar().of([])
