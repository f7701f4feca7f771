"""Run a script once with probes, for the tests of the probes."""

import tempfile
from pathlib import Path

from flatout.hardware.machine import read_machine
from flatout.records.recipe import Recipe
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT
from tests.support.programs import workload_of

SCRIPTS = ROOT / "tests/scripts/probed"


def probed(script, *arguments, probes, recipe=None, **options):
    """Return the trial of a script with probes."""
    workload = workload_of(Path(tempfile.mkdtemp(prefix="flatout-test-")), str(script), *arguments)
    found = run_trial(
        workload,
        recipe or Recipe(),
        read_machine(torch=False),
        TrialOptions(**{"limit_s": 100.0, "measure_s": 4.0} | options, probes=probes),
    )
    workload.folder.rmdir()
    return found
