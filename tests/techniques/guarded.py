"""Play techniques on real scripts, in processes of their own, and ask the guard."""

import functools
import shutil
import sys
import tempfile
from pathlib import Path

from flatout.hardware.machine import read_machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT

SCRIPTS = ROOT / "tests/scripts/techniques"
ELABORATE = "naive_gpt.py --optimizer NAdam --accumulate 2 --clip 0.5 --schedule --vocabulary 4099"
"""A training that offers something to most techniques: its reference trials serve them all."""


@functools.cache
def machine():
    return read_machine(torch=False)


@functools.cache
def referee_of(command):
    """Return the referee of one command line; its reference trials serve every technique."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    shutil.copytree(SCRIPTS, folder / "work")
    workload = workload_of(command, folder / "work")
    lab = TrialRunner(
        workload=workload, machine=machine(), out=folder, limit_s=200.0, runner=noting
    )
    return GuardChecker(lab, lambda _: None)


def noting(workload, recipe, host, options):
    """Run a trial, and note what became of each of its techniques."""
    trial = run_trial(workload, recipe, host, options)
    _became[workload.folder, recipe.label] = {x.technique: (x.status, x.why) for x in trial.applied}
    return trial


_became = {}
"""By the script's folder and the recipe: of each technique its status and why, in the guard's
trial."""


def workload_of(command, folder=SCRIPTS):
    target, *arguments = command.split()
    return Workload(target=target, arguments=tuple(arguments), folder=folder, python=sys.executable)


def recipe_of(*names, **settings):
    """Return a recipe of these techniques; the settings are those of the last."""
    choices = [Choice(technique=name) for name in names[:-1]]
    return Recipe(choices=(*choices, Choice(technique=names[-1], settings=settings)))


def checked(command, *names, **settings):
    """Return what the guard says of the techniques on a script."""
    return referee_of(command).check(recipe_of(*names, **settings))


def became(command, *names, **settings):
    """Return the status of the last technique in the guard's trial, and why."""
    folder = referee_of(command).lab.workload.folder
    return _became[folder, recipe_of(*names, **settings).label][names[-1]]


def files_of(command):
    """Return the files in the script's folder, each with its content."""
    folder = referee_of(command).lab.workload.folder
    found = (path for path in sorted(folder.rglob("*")) if "__pycache__" not in path.parts)
    return {str(path): path.read_bytes() for path in found if path.is_file()}


def played(command, *names, steps=None, **settings):
    """Return a trial of the techniques on a script: timed, or of exactly so many steps."""
    recipe = recipe_of(*names, **settings) if names else Recipe()
    options = TrialOptions(limit_s=600.0, measure_s=3.0, steps=steps)
    return run_trial(workload_of(command), recipe, machine(), options)
