"""The suite's judgement of foreseen gains, on made-up results; and its script, really run."""

from pathlib import Path

import pytest

from benchmarks.suites.ceilings import SCENARIOS, SCRIPT, Foreseen, holds, row
from flatout.hardware.machine import read_machine
from flatout.records.recipe import Recipe
from flatout.records.trial import Outcome
from flatout.tuning.trials import TrialOptions, run_trial
from tests.benchmarks.made_up import a_pair
from tests.support.programs import workload_of


def foreseen(*gains, really=2.0, scenario="sleep"):
    return Foreseen(scenario=scenario, gains=gains, really=a_pair(really), raw={})


@pytest.mark.parametrize(
    ("gain", "expected"), [(2.19, True), (1.81, True), (2.21, False), (1.79, False)]
)
def test_a_foreseen_gain_may_be_a_tenth_off(gain, expected):
    assert holds([foreseen(2.0), foreseen(gain)]) is expected


def test_no_scenario_proves_nothing():
    assert not holds([])


def test_one_odd_round_does_not_decide():
    assert foreseen(2.0, 2.1, 9.0).off == pytest.approx(0.05)


def test_the_row_shows_both_gains():
    shown = row(foreseen(2.1))

    assert shown == ("sleep: a disk that makes each sample wait", "2.10x", "2.00x", *shown[3:])
    assert shown[-1] == "+5.0%"


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(name,) for name in SCENARIOS] + [("decode", "--free")])
def test_its_script_trains(arguments, tmp_path):
    workload = workload_of(Path(tmp_path), str(SCRIPT), *arguments)

    trial = run_trial(
        workload, Recipe(), read_machine(torch=False), TrialOptions(steps=4, limit_s=200.0)
    )

    assert trial.outcome is Outcome.OK, trial.traceback
    has_loader = bool(trial.profile.training_loaders)
    assert has_loader or "--free" in arguments
