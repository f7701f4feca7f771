"""Run a script as a pass with probes, each combination once for all tests that look at it."""

import functools

from tests.paths import ROOT
from tests.support.trial_runs import run_alone

SCRIPTS = ROOT / "tests/scripts/profiled"
STEPS = 14
"""Training steps of a pass: warm-up, two to settle, eight observed, one to end in."""


@functools.cache
def seen_in(command, *probes):
    """Return what one probe saw, or of several what each of them saw."""
    target, *arguments = command.split()
    asked = {name: {} for name in probes}
    trial = run_alone(SCRIPTS / target, arguments, limit_s=120.0, steps=STEPS, probes=asked)
    assert trial.details["errors"] == [], trial.traceback
    seen = trial.details["probes"]
    return seen[probes[0]] if len(probes) == 1 else seen


def line_of(script, text):
    """Return the name of the one line of a script that holds a text."""
    lines = (SCRIPTS / script).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, start=1) if text in line)
    return f"{script}:{number}"
