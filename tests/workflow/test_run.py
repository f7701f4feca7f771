"""The verb `run`: the script's own training, with a recipe."""

import shutil
import sys

import pytest

from flatout.core.recipe import Choice, Recipe
from flatout.core.workload import Workload
from flatout.workflow.run import run
from tests.workflow.trial_runs import copy_scripts

NOT_APPLIED = Recipe(choices=(Choice(technique="channels_last"),))
"""The scripts below have no convolution."""


@pytest.fixture
def folder():
    folder = copy_scripts()
    yield folder
    shutil.rmtree(folder.parent)


def run_script(folder, command):
    target, *arguments = command.split()
    return run(
        Workload(target=target, arguments=tuple(arguments), folder=folder, python=sys.executable),
        NOT_APPLIED,
    )


def test_run_trains_to_the_end_and_keeps_what_the_script_saves(folder, capfd):
    code = run_script(folder, "plain_loop.py --epochs 2")

    assert code == 0
    assert len((folder / "log.txt").read_text().splitlines()) == 2
    assert (folder / "checkpoint.pt").exists()
    assert "channels_last was not applied (not_applicable)" in capfd.readouterr().err


@pytest.mark.chaos
def test_run_passes_on_the_exit_code_of_a_script_that_fails(folder, capfd):
    code = run_script(folder, "endings.py crash")

    assert code == 1
    assert "expected a tensor of 7 columns" in capfd.readouterr().err


@pytest.mark.slow
def test_run_tells_what_was_not_applied_once_however_many_processes_there_are(folder, capfd):
    code = run_script(folder, "spawn_workers.py --epochs 1")

    assert code == 0
    assert capfd.readouterr().err.count("channels_last was not applied") == 1
