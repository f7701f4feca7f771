"""Run the test scripts as trials, each combination once for all tests that look at it."""

import dataclasses
import functools
import shutil
import sys
import tempfile
from pathlib import Path

from flatout.hardware.machine import read_machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT

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
    folder = copy_scripts()
    target, *arguments = command.split()
    recipe = Recipe(choices=tuple(Choice(technique=name) for name in techniques))
    workload = Workload(
        target=target, arguments=tuple(arguments), folder=folder, python=sys.executable
    )
    try:
        trial = run_trial(workload, recipe, machine(), TrialOptions(**LIMIT | options))
    finally:
        shutil.rmtree(folder.parent)
    return trial
