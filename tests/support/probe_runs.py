"""Run a script as a pass with probes, each combination once for all tests that look at it."""

import functools
import shutil
import sys
import tempfile
from pathlib import Path

from flatout.hardware.machine import read_machine
from flatout.records.recipe import Recipe
from flatout.records.trial import Workload
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT

SCRIPTS = ROOT / "tests/scripts/profiled"
STEPS = 14
"""Training steps of a pass: warm-up, two to settle, eight observed, one to end in."""


@functools.cache
def seen_in(command, *probes):
    """Return what one probe saw, or of several what each of them saw."""
    folder = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    target, *arguments = command.split()
    shutil.copy(SCRIPTS / target, folder)
    workload = Workload(
        target=target, arguments=tuple(arguments), folder=folder, python=sys.executable
    )
    options = TrialOptions(limit_s=120.0, steps=STEPS, probes={name: {} for name in probes})
    try:
        trial = run_trial(workload, Recipe(), read_machine(torch=False), options)
    finally:
        shutil.rmtree(folder)
    assert trial.details["errors"] == [], trial.traceback
    seen = trial.details["probes"]
    return seen[probes[0]] if len(probes) == 1 else seen


def line_of(script, text):
    """Return the name of the one line of a script that holds a text."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, start=1) if text in line)
    return f"{script}:{number}"
