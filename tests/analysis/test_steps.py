"""From segments to the steps that count."""

from dataclasses import replace

import pytest

from flatout.agent.recorder import MadeSteps
from flatout.analysis.profile import epoch_start_ms, trial_step_s
from flatout.analysis.steps import (
    find_anchor,
    find_warm,
    running_anchor,
    step_of,
    steps_of,
    trainings_of,
    whole_epochs,
    window_of,
)
from flatout.records.trial_result import LoaderSeen, Segment, TrialResult


def segment(who=0, seconds=0.1, evals=0, loader_starts=0, saved=0.0, losses=(1.0,)):
    phases = [0.0, seconds, 0.0, 0.0, 0.0, 0.0, saved]
    return Segment(
        who=who,
        seconds=phases,
        batches=1,
        samples=8,
        backwards=1,
        evals=evals,
        loader_starts=loader_starts,
        losses=list(losses),
    )


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


def test_what_most_steps_hold_makes_none_dirty_and_more_of_it_does():
    rows = [segment(evals=1, loader_starts=1) for _ in range(20)]
    rows[9] = segment(evals=12, loader_starts=1, seconds=5.0)
    rows[14] = segment(evals=1, loader_starts=3, seconds=5.0)

    window = window_of(steps_of(rows))

    assert not window.are_clean  # a note says what all of them hold
    assert len(window.measured) == 17
    assert {step.wall_s for step in window.measured} == {0.1}


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


@pytest.mark.parametrize("inner_steps", [1, 2, 5])
def test_a_loop_within_a_loop_makes_its_optimizer_again_and_a_step_is_the_outer_one_s(inner_steps):
    tasks = range(1, 13)
    rows = [segment(who=who) for task in tasks for who in (*[task] * inner_steps, 0)]

    steps = steps_of(rows)

    assert len(steps) >= len(tasks) - 1  # the first task's may be a training of its own
    assert {step.backwards for step in steps[1:]} == {inner_steps + 1}


def test_an_optimizer_that_is_built_again_beside_another_one_keeps_its_place():
    epochs = [segment(who=who) for epoch in range(1, 5) for who in (0, epoch) * 10]

    assert [step.backwards for step in steps_of(epochs)] == [2] * 40


def test_inner_optimizers_do_not_hold_back_the_count():
    whos = [who for task in range(1, 41) for who in (task, task, 0)]
    counts = {0: 40, **dict.fromkeys(range(1, 41), 2)}

    assert MadeSteps()(counts, [Segment(who=who) for who in whos]) == (40, 40)


@pytest.mark.parametrize(
    ("calls", "backwards", "sizes", "samples"),
    [
        (1, 1, [8], 8),
        (2, 1, [8, 8], 8),
        (4, 4, [8] * 4, 32),
        (2, 0, [8, 8], 16),
        (0, 1, [], 0),
        (11, 1, [*[1] * 10, 128], 128),  # a policy that acts with gradients on, then learns
    ],
)
def test_without_a_batch_the_samples_are_those_that_the_model_was_called_with(
    calls, backwards, sizes, samples
):
    part = Segment(
        seconds=[0.1] * 7,
        calls=[calls] if calls else [],
        backwards=backwards,
        called=sum(sizes),
        called_most=max(sizes, default=0),
    )

    assert step_of([part]).samples == samples
    assert step_of([part, replace(part, calls=[0], called=0)]).samples == samples
    assert step_of([part, replace(part, samples=5, batches=1)]).samples == 5


def samples_of(segments):
    return [step.samples for step in steps_of(segments)]


def test_chunks_of_a_batch_add_no_samples_to_those_of_the_loader():
    """As where backward goes through time in pieces: each calls the model with all sequences."""
    batch = [replace(given(8), samples=8, batches=1), *[given(8)] * 3]
    first = [replace(batch[0], loader_starts=1), *batch[1:]]

    assert samples_of(batch * 5) == [8, 0, 0, 0] * 5
    assert samples_of(first + batch * 4 + first + batch * 4) == [8, 0, 0, 0] * 10


def test_steps_on_kept_or_own_batches_have_samples_whatever_evaluations_draw():
    drawn = replace(given(6), samples=6, batches=1)
    start = replace(drawn, loader_starts=1)
    evaluated = replace(given(6), samples=70, batches=5, evals=4, loader_starts=1)
    own = [given(6)] * 19

    assert samples_of([start, *[drawn] * 15, *own]) == [6] * 35
    assert samples_of([evaluated, *own] * 3) == [70, *[6] * 19] * 3


@pytest.mark.parametrize(
    ("whos", "samples"),
    [
        ([0, 1], 64),  # an actor and its critic
        ([0, 0, 0, 1], 3 * 64),  # a critic with batches of its own before each generator's step
    ],
)
def test_optimizers_that_take_turns_train_on_the_same_samples(whos, samples):
    turn = [replace(given(64), who=who) for who in whos]

    assert {step.samples for step in steps_of(turn * 12)} == {samples}


def test_optimizers_that_are_made_again_for_each_task_have_samples_of_their_own():
    rows = [replace(given(10), who=who) for task in range(1, 13) for who in (task, task, 0)]

    assert {step.samples for step in steps_of(rows)[1:]} == {30}


def given(samples):
    return Segment(seconds=[0.1] * 7, calls=[1], backwards=1, called=samples, called_most=samples)


def test_trainings_that_follow_each_other_are_told_apart():
    folds = [segment(who=fold) for fold in range(5) for _ in range(16)]

    assert len(steps_of(folds)) == 80
    assert {step.backwards for step in steps_of(folds)} == {1}


def test_only_trainings_like_the_longest_count():
    small = [segment(who=0, seconds=0.01) for _ in range(25)]
    large = [segment(who=1, seconds=0.1) for _ in range(40)]
    begun = [segment(who=2, seconds=0.1) for _ in range(5)]

    assert [step.wall_s for step in steps_of(small + large + begun)] == [0.1] * 45


def test_a_first_turn_of_several_optimizers_is_one_training():
    assert trainings_of([0, 0, 0, 0, 0, 1]) == [slice(0, 6)]
    assert trainings_of([0] * 100 + [1, 0] * 50) == [slice(0, 200)]


@pytest.mark.parametrize("epochs", [1, 3])
def test_an_optimizer_that_steps_once_in_an_epoch_ends_no_steps(epochs):
    rows = [segment(who=who) for who in (1, *[0] * 100) * epochs]

    steps = steps_of(rows)

    assert [step.backwards for step in steps] == [2, *[1] * 99] * epochs
    assert window_of(steps).is_enough


def test_a_running_training_ends_its_steps_with_its_own_optimizer():
    assert running_anchor([0] * 30 + [1] * 4) == 1
    assert running_anchor([0] * 4 + [1, 2, 2] * 3) == 1


def test_optimizers_that_are_over_do_not_hold_back_the_count():
    made = MadeSteps()

    whos = [who for who in range(6) for _ in range(16)]
    counts = dict.fromkeys(range(6), 16)

    assert made(counts, [Segment(who=who) for who in whos]) == (96, 96)


def test_optimizers_that_take_turns_are_counted_by_themselves():
    segments = [Segment(who=who) for who in [0, 0, 0, 0, 0, 1] * 4]

    assert MadeSteps()({0: 20, 1: 4}, segments) == (4, 20)


def epochs(count, steps=10, slow=3):
    """Return segments of epochs whose first step holds the start, and the next ones are slow."""
    found = []
    for _ in range(count):
        found.append(segment(seconds=0.9, loader_starts=1))
        found += [segment(seconds=0.3)] * slow + [segment(seconds=0.1)] * (steps - 1 - slow)
    return found


def test_whole_epochs_lie_between_their_starts():
    window = window_of(steps_of(epochs(4) + epochs(1)[:5]), 4)

    found = whole_epochs(window, 10)

    # The first may be warm-up, the last was cut off.
    assert len(found) >= 2
    assert all(len(epoch) == 9 for epoch in found)


def test_steps_that_are_slow_at_every_epochs_start_count_in_their_share():
    window = window_of(steps_of(epochs(4)), 4)

    assert trial_step_s(window, 10) == pytest.approx((3 * 0.3 + 6 * 0.1) / 9)


def result(workers=4, starts=(0.9, 0.5, 0.5), ends=(0.2, 0.2), kind="cpu"):
    loader = LoaderSeen("main:1", {}, is_training=True, starts_s=list(starts), ends_s=list(ends))
    return TrialResult(segments=tuple(epochs(4)), period=workers, loaders=(loader,))


def test_an_epoch_costs_the_start_of_its_workers_and_the_end_of_those_before():
    found = result()

    window = window_of(steps_of(found.segments), found.period)

    # Start and end; and 0.9 s of computing in the first step instead of the usual 1/6 s.
    expected = 1e3 * (0.5 + 0.2 + 0.9 - 1.5 / 9)
    assert epoch_start_ms(found, window) == pytest.approx(expected, rel=0.05)


def test_the_first_start_alone_says_nothing():
    found = result(starts=(0.9,))

    assert epoch_start_ms(found, window_of(steps_of(found.segments), 4)) == 0.0
