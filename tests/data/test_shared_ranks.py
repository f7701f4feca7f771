"""A real launcher's ranks: what one of them decodes, the other one finds."""

import sys

import pytest

from flatout.hardware.machine import read_machine
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT

SCRIPT = ROOT / "tests/scripts/data/two_ranks_of_pictures.py"
LAUNCHER = "-m torch.distributed.run"


@pytest.mark.slow
def test_ranks_of_torchrun_keep_their_pictures_in_one_memory(tmp_path):
    workload = Workload(
        target=LAUNCHER,
        arguments=("--standalone", "--nproc-per-node", "2", str(SCRIPT)),
        folder=tmp_path,
        python=sys.executable,
    )
    recipe = Recipe(choices=(Choice(technique="ram_cache"),))

    trial = run_trial(
        workload, recipe, read_machine(torch=False), TrialOptions(limit_s=120.0, steps=10)
    )

    # The script itself looks, and fails where they do not.
    assert trial.outcome is Outcome.OK, trial.message + trial.traceback
    assert [(x.technique, x.status) for x in trial.applied] == [("ram_cache", "applied")]
