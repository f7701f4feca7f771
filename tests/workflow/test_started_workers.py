"""How the workers that `loader_workers` brings in start, in real trainings."""

import re
import sys

import pytest

from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.workflow.run import run
from tests.support.programs import ran
from tests.support.trial_runs import SCRIPTS, copy_scripts, trial_of

pytestmark = pytest.mark.slow

SCRIPT = "started_workers.py"
WORKERS = ("loader_workers",)
SHORT = {"measure_s": 2.0}


def alone(arguments):
    """Run the script as a user would, for one epoch, without flatout."""
    command = [sys.executable, SCRIPT, "--epochs", "1", *arguments.split()]
    return ran(command, cwd=SCRIPTS, timeout=120)


def batches_of(text):
    return re.findall(r"batches \w{64}", text)


def trained(arguments):
    """Return the facts on the loader and what became of the technique, of a trial with it."""
    trial = trial_of(f"{SCRIPT} {arguments}", techniques=WORKERS, **SHORT)
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    assert trial.details["errors"] == []
    (loader,) = trial.profile.training_loaders
    return loader, trial.applied[0], trial.profile.losses


@pytest.mark.parametrize("arguments", ["--method spawn --local", "--method forkserver --bare"])
def test_workers_that_end_a_script_when_set_by_hand_are_forked_by_the_technique(arguments):
    by_hand = alone(f"{arguments} --workers 2")
    loader, technique, losses = trained(arguments)
    without = trial_of(f"{SCRIPT} {arguments}", **SHORT).profile.losses

    assert by_hand.returncode != 0
    assert alone(arguments).returncode == 0
    assert (technique.status, loader.workers, loader.start_method) == ("applied", 2, "fork")
    assert "instead of" in technique.why
    assert loader.start_reason == technique.why
    steps = min(len(losses), len(without))
    assert steps > 16
    assert losses[:steps] == without[:steps]


def test_the_reason_names_what_cannot_be_pickled_and_the_line_that_would_run_again():
    local = trained("--method spawn --local")[0].start_reason
    bare = trained("--method forkserver --bare")[0].start_reason
    last = (SCRIPTS / SCRIPT).read_text().splitlines()

    assert re.search(r"^flatout forks them instead of spawn: dataset: .*local.*main", local)
    assert f"line {len(last)} of {SCRIPT} is not below if __name__" in bare


def test_the_order_of_a_whole_training_is_the_script_s(capfd):
    folder = copy_scripts()
    arguments = ("--method", "spawn", "--local", "--epochs", "2")
    workload = Workload(target=SCRIPT, arguments=arguments, folder=folder, python=sys.executable)
    plain = alone(" ".join(arguments))

    recipe = Recipe(choices=(Choice(technique="loader_workers"),))
    code = run(workload, recipe)

    assert code == 0
    assert batches_of(capfd.readouterr().out) == batches_of(plain.stdout) != []


@pytest.mark.parametrize(
    ("arguments", "method", "reason"),
    [
        ("--method fork --workers 1 --context spawn", "spawn", "the script chose it for this"),
        ("--method spawn", "spawn", "the script chose it for the whole process"),
        ("--method fork --bare --local", "fork", ""),
    ],
)
def test_a_start_that_works_is_left_alone(arguments, method, reason):
    loader, technique, _ = trained(arguments)

    assert (loader.workers, loader.start_method, technique.why) == (2, method, "")
    assert loader.start_reason.startswith(reason)
    assert "flatout" not in loader.start_reason
