"""Workers that die in a trial of the tuner get one more, with fewer of them."""

import shutil
from dataclasses import dataclass, replace

import pytest

from flatout.records.ablation import Verdict
from flatout.records.trial import Outcome
from flatout.reporting.tuning.text import render_ablation
from flatout.tuning.trials import run_trial
from flatout.workflow.tune import BaselineFailedError, TuneOptions, tune
from tests.analysis.test_loader_faults import SCRIPT
from tests.support.programs import workload_of
from tests.support.trial_runs import machine
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


@dataclass
class Greedy(World):
    """The script asks for 16 workers itself, of which the machine holds so many."""

    held: int = 8

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        asked = [c.settings["num_workers"] for c in recipe.choices if "num_workers" in c.settings]
        if (asked or [16])[0] <= self.held:
            return trial
        loader = {"address": "train.py:main#0", "num_workers": 16, "prefetch_factor": 4}
        return replace(
            trial,
            outcome=Outcome.CRASH,
            profile=None,
            message="worker_killed: loader worker 71 was killed",
            details={"fault": "worker_killed", "loaders": [loader]},
        )


@pytest.mark.chaos
def test_a_script_whose_own_workers_die_is_tuned_with_half_of_them(tmp_path):
    ablation = run(Greedy({"bf16_autocast": 0.6}), tmp_path)

    assert ablation.needed == ("loader_workers num_workers=8 prefetch_factor=4",)
    assert set(ablation.recipe.names) == {"loader_workers", "bf16_autocast"}
    assert ablation.notes[0] == "unchanged, worker_killed: loader worker 71 was killed"
    assert "it runs with loader_workers num_workers=8" in ablation.notes[1]
    assert ablation.rows[0].why == "it does not run without this"


@pytest.mark.chaos
def test_a_script_that_half_of_the_workers_do_not_help_fails_and_says_what_was_tried(tmp_path):
    world = Greedy({}, held=4)

    with pytest.raises(BaselineFailedError, match="71 was killed; tried once more with loader_w"):
        run(world, tmp_path)

    assert world.asked == ["baseline", "loader_workers num_workers=8 prefetch_factor=4"]


@pytest.mark.chaos
def test_workers_that_the_user_keeps_out_are_not_halved(tmp_path):
    world = Greedy({})

    with pytest.raises(BaselineFailedError, match=r"71 was killed$"):
        run(world, tmp_path, skip=("loader_workers",))

    assert world.asked == ["baseline"]


@pytest.mark.slow
@pytest.mark.chaos
def test_a_real_script_whose_four_workers_die_runs_with_two(tmp_path):
    (tmp_path / "work").mkdir()
    shutil.copy(SCRIPT, tmp_path / "work")
    workload = workload_of(tmp_path / "work", SCRIPT.name, "too_many")
    options = TuneOptions(
        out=tmp_path / "out", budget_s=120.0, only=("loader_workers",), accepts_load=True
    )

    found = tune(workload, options, lambda _: None, machine())

    assert found.needed == ("loader_workers num_workers=2",)
    assert found.notes[0].startswith("unchanged, worker_killed: ")
    text = render_ablation(found, width=200, details=True)
    assert "It runs now: with loader_workers num_workers=2 its loader's workers last" in text


def run_soon_hung(workload, recipe, machine, options):
    return run_trial(workload, recipe, machine, replace(options, hang_s=min(options.hang_s, 40.0)))


@pytest.mark.slow
@pytest.mark.chaos
@pytest.mark.parametrize(
    ("how", "cause"), [("tuned_exits", "worker_exited: "), ("tuned_hangs", "worker_hung: ")]
)
def test_real_workers_that_a_tuning_proposes_and_that_fail_are_tried_once_more(
    tmp_path, how, cause
):
    (tmp_path / "work").mkdir()
    shutil.copy(SCRIPT, tmp_path / "work")
    workload = workload_of(tmp_path / "work", SCRIPT.name, how)
    options = TuneOptions(
        out=tmp_path / "out",
        budget_s=400.0,
        only=("loader_workers",),
        accepts_load=True,
        runner=run_soon_hung,
    )

    found = tune(workload, options, lambda _: None, replace(machine(), usable_cores=2))

    first, second = [row for row in found.rows if row.choice.technique == "loader_workers"]
    workers = first.choice.settings["num_workers"]
    assert first.verdict is Verdict.FAILED
    assert cause in first.why
    assert first.why.endswith(f"; tried once more with num_workers={workers // 2}")
    assert second.choice.settings["num_workers"] == workers // 2
