"""Run the test scripts as trials, each combination once for all tests that look at it."""

import dataclasses
import functools
import shlex
import shutil
import tempfile
from pathlib import Path

from flatout.hardware.machine import read_machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT
from tests.support.programs import workload_of

LIMIT = {"limit_s": 120.0}
SCRIPTS = ROOT / "tests/scripts/plain"


@functools.cache
def machine():
    return read_machine(torch=False)


def copy_scripts():
    """Return a fresh copy of the scripts' folder."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    shutil.copytree(SCRIPTS, folder / "work")
    return folder / "work"


def trial_of(command, techniques=(), **options):
    """Return the trial of one command line, run in a fresh copy of the scripts' folder."""
    usual = {field.name: field.default for field in dataclasses.fields(TrialOptions)} | LIMIT
    unusual = {name: value for name, value in options.items() if usual[name] != value}
    return _trial_of(command, techniques, **unusual)  # one trial, whether the usual is spelled out


@functools.cache
def _trial_of(command, techniques, **options):
    target, *arguments = shlex.split(command)
    return run_in(copy_scripts(), target, arguments, recipe_of(*techniques), **LIMIT | options)


def run_alone(script, arguments=(), recipe=Recipe(), **options):
    """Return the trial of one script in a folder of its own."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-test-")) / "work"
    folder.mkdir()
    shutil.copy(script, folder)
    return run_in(folder, script.name, arguments, recipe, **options)


def run_in(folder, target, arguments, recipe, **options):
    """Return a trial in a folder, which is taken away afterwards with the one above it."""
    workload = workload_of(folder, target, *arguments)
    try:
        return run_trial(workload, recipe, machine(), TrialOptions(**options))
    finally:
        shutil.rmtree(folder.parent)


def recipe_of(*names):
    return Recipe(choices=tuple(Choice(technique=name) for name in names))


def profile_of(command, **options):
    return sound(trial_of(command, **options))


def sound(trial):
    """Return the profile of a trial in which nothing failed."""
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    assert trial.details["errors"] == []
    return trial.profile
