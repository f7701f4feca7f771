"""Play levers on real scripts, in processes of their own, and ask the guard."""

import functools
import shutil
import sys
import tempfile
from pathlib import Path

from flatout.core.recipe import Choice, Recipe
from flatout.core.workload import Workload
from flatout.hardware.machine import read_machine
from flatout.workflow.lab import Lab
from flatout.workflow.referee import Referee
from flatout.workflow.trials import TrialOptions, run_trial

SCRIPTS = Path(__file__).parent / "scripts"
ELABORATE = "naive_gpt.py --optimizer NAdam --accumulate 2 --clip 0.5 --schedule --vocabulary 4099"
"""A training that offers something to most levers: its reference trials serve them all."""


@functools.cache
def machine():
    return read_machine(torch=False)


@functools.cache
def referee_of(command):
    """Return the referee of one command line; its reference trials serve every lever."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    shutil.copytree(SCRIPTS, folder / "work")
    workload = workload_of(command, folder / "work")
    lab = Lab(workload=workload, machine=machine(), out=folder, limit_s=200.0)
    return Referee(lab, lambda _: None)


def workload_of(command, folder=SCRIPTS):
    target, *arguments = command.split()
    return Workload(target=target, arguments=tuple(arguments), folder=folder, python=sys.executable)


def recipe_of(*names, **settings):
    """Return a recipe of these levers; the settings are those of the last."""
    choices = [Choice(technique=name) for name in names[:-1]]
    return Recipe(choices=(*choices, Choice(technique=names[-1], settings=settings)))


def checked(command, *names, **settings):
    """Return what the guard says of the levers on a script."""
    return referee_of(command).check(recipe_of(*names, **settings))


def played(command, *names, **settings):
    """Return a timed trial of the levers on a script."""
    recipe = recipe_of(*names, **settings) if names else Recipe()
    options = TrialOptions(limit_s=200.0, measure_s=3.0)
    return run_trial(workload_of(command), recipe, machine(), options)
