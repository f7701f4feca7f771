"""Workers that die in a trial of the tuner get one more, with fewer of them."""

from dataclasses import replace

import pytest

from flatout.core.ablation import Verdict
from flatout.core.trial import Outcome
from tests.workflow.test_tune import World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes


class SmallMemory(World):
    """Two workers fill /dev/shm, one does not."""

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        workers = [c.settings["num_workers"] for c in recipe.choices if "num_workers" in c.settings]
        if workers and workers[0] > 1:
            fault = {"fault": "shm_full"}
            return replace(trial, outcome=Outcome.CRASH, message="shm_full: ...", details=fault)
        return trial


@pytest.mark.chaos
def test_workers_that_die_are_tried_once_more_with_half_of_them(tmp_path):
    world = SmallMemory({"loader_workers": 0.6})

    ablation = run(world, tmp_path, only=("loader_workers",))

    tried = [row for row in ablation.rows if row.choice.technique == "loader_workers"]
    assert [row.choice.settings["num_workers"] for row in tried] == [2, 1]
    assert [row.verdict for row in tried] == [Verdict.FAILED, Verdict.KEPT]
    assert tried[0].why == "crash: shm_full: ...; tried once more with num_workers=1"
    assert [c.settings["num_workers"] for c in ablation.recipe.choices] == [1]
