"""From segments to the steps that count."""

import pytest

from flatout.profiling.steps import find_anchor, find_warm, steps_of, window_of


def segment(who=0, seconds=0.1, evals=0, loader_starts=0, saved=0.0, losses=(1.0,)):
    phases = [0.0, seconds, 0.0, 0.0, 0.0, 0.0, saved]
    return {
        "who": who,
        "seconds": phases,
        "end": 0.0,
        "batches": 1,
        "samples": 8,
        "forwards": 1,
        "backwards": 1,
        "evals": evals,
        "loader_starts": loader_starts,
        "losses": list(losses),
    }


def test_alternating_optimizers_make_one_step_of_two():
    steps = steps_of([segment(who=0), segment(who=1)] * 3)

    assert len(steps) == 3
    assert steps[0].backwards == 2
    assert steps[0].losses == (1.0, 1.0)


def test_critic_steps_belong_to_the_generator_step():
    whos = ([0] * 5 + [1]) * 2

    assert find_anchor(whos) == 1
    assert len(steps_of([segment(who=who) for who in whos])) == 2


@pytest.mark.parametrize("change", [{"evals": 1}, {"loader_starts": 1}, {"saved": 0.5}])
def test_steps_with_other_work_are_left_out(change):
    rows = [segment() for _ in range(12)]
    rows[6] = segment(**change, seconds=5.0)

    window = window_of(steps_of(rows))

    assert window.are_clean
    assert all(step.wall_s < 1 for step in window.measured)


def test_dirty_steps_count_when_there_are_hardly_others():
    window = window_of(steps_of([segment(evals=1) for _ in range(10)]))

    assert not window.are_clean
    assert len(window.measured) == 9


def test_slow_first_steps_are_warm_up():
    times = [9.0, 4.0, 1.02, 1.0, 0.99, 1.01, 1.0, 1.0, 1.0, 1.0, 0.98, 1.0]

    window = window_of(steps_of([segment(seconds=t) for t in times]))

    assert window.is_warm
    assert window.warmup_steps == 2
    assert len(window.measured) == 10


def test_no_more_than_half_is_dropped_and_that_is_not_warm():
    assert find_warm([9.0, 8.0, 7.0, 6.0, 5.0, 1.0, 1.0, 1.0]) == (4, False)


def test_bursts_of_two_workers_are_averaged_before_they_are_judged():
    times = [1.0, 3.0] * 12

    window = window_of(steps_of([segment(seconds=t) for t in times]), period=2)

    assert window.is_warm
    assert window.is_enough


def test_half_a_second_of_fast_steps_is_needed():
    few = window_of(steps_of([segment(seconds=0.001) for _ in range(60)]))
    many = window_of(steps_of([segment(seconds=0.001) for _ in range(600)]))

    assert not few.is_enough
    assert many.is_enough
