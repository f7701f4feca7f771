"""The suite `fed` compares a recipe with the limits of the same turn."""

from dataclasses import replace

import pytest

from benchmarks.bench import Arm
from benchmarks.suites.fed import Limits, Turn, record_of
from flatout.records.journey import Pipeline
from flatout.records.recipe import Recipe
from flatout.tuning.feeding import Costs
from tests.benchmarks.made_up import a_machine, a_profile

SAMPLES = 10


class NoLab:
    """Runs nothing."""

    machine = a_machine()


def arm(name, step_ms):
    """Return an arm of the benchmark that was played twice."""
    return Arm(name=name, lab=NoLab(), profiles=[a_profile(step_ms), a_profile(step_ms)])


def limits(*turns):
    """Return the limits of turns of step, free step and training in ms a step, ms a sample."""
    final = replace(a_profile(), samples_per_step=SAMPLES)
    return Limits(
        NoLab(),
        Recipe(),
        final,
        [
            # Where nothing trains meanwhile, a sample is made in half of the time.
            Turn(step, free, Costs(trained_ms=trained, made_ms=made), pipeline(made / 2))
            for step, free, trained, made in turns
        ],
    )


def pipeline(made_ms):
    return Pipeline(
        stages=(), samples=8, cpu_ms=made_ms, samples_per_s=1.0, cores_needed=1.0, usable_cores=2.0
    )


def test_a_machine_that_slows_down_between_turns_changes_no_share():
    # 2 cores, 10 samples: (10 ms to make each + 40 ms to train) / 2 = 70 ms at best; twice as slow
    # in the second turn, in which nothing but the machine is another.
    found = limits((73.7, 40, 40, 10), (147.4, 80, 80, 20), (73.7, 40, 40, 10)).share()

    assert found.ratio == pytest.approx(0.95, abs=1e-3)
    assert found.interval[1] - found.interval[0] < 1e-6
    assert found.n == 3


def test_the_lower_one_of_a_turns_limits_counts():
    # Free data would take 90 ms, the cores 70.
    assert limits((100, 90, 40, 10), (100, 90, 40, 10)).share().ratio == pytest.approx(0.9)


@pytest.mark.parametrize(("step_ms", "holds"), [(73.0, True), (74.5, False), (60.0, False)])
def test_the_claim_holds_within_five_percent_and_not_far_above_what_can_be(step_ms, holds):
    record = record_of(
        Recipe(),
        (arm("unchanged", 200.0), arm("recipe", step_ms)),
        limits((step_ms, 40, 40, 10), (step_ms, 40, 40, 10)),
    )

    assert record.holds is holds
    assert f"{100 * 70 / step_ms:.1f} %" in record.finding
    assert record.raw["shares"] == pytest.approx([70 / step_ms] * 2)
