"""The staged table, made of what a tuning measures: on trials made up from a known truth."""

import sys
from dataclasses import replace

import pytest

from flatout.hardware.machine import read_machine
from flatout.records.ablation import Comparison, LossCheck, Row, Verdict
from flatout.records.profile import PeakBytes
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Workload
from flatout.tuning.experiments import Judgement, MachineBusyError, TrialHistory
from flatout.tuning.feeding import StoredSample
from flatout.tuning.policy import TuningTask, budget_of, tuning
from flatout.tuning.script_files import source_of
from flatout.tuning.staged import Measured, length_of, measure_stages
from flatout.tuning.trial_runner import TrialRunner
from tests.workflow.test_tune import MACHINE, WORKLOAD, World, profile, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

WORKERS, BF16 = Choice(technique="loader_workers"), Choice(technique="bf16_autocast")
FACTORS = {"loader_workers": 0.8, "bf16_autocast": 0.5}
RECIPE = Recipe(choices=(WORKERS, BF16))
PROOF = Comparison(ratio=2.4, interval=(2.2, 2.6), n=3)


def known(tmp_path, *rows, left_s=100.0, **facts):
    world = World(FACTORS, noise=0.0)
    lab = TrialRunner(workload=WORKLOAD, machine=MACHINE, out=tmp_path, limit_s=60.0, runner=world)
    given = {
        "history": lab.history,
        "baseline": profile(100.0),
        "floor": Recipe(),
        "recipe": RECIPE,
        "rows": rows,
        "final": profile(40.0),
        "confirmation": PROOF,
        "left_s": lambda: left_s,
    }
    return lab, Measured(**given | facts), world


def stages_of(tmp_path, **facts):
    lab, measured, _ = known(tmp_path, **facts)
    return lab.drive(measure_stages(measured))


def row(choice, ratio, *, on_top_of=(), source="pairs", **facts):
    pair = Comparison(ratio=ratio, interval=(ratio, ratio), n=3, source=source)
    return Row(
        choice=choice,
        numerics="exact",
        verdict=Verdict.KEPT,
        on_top_of=on_top_of,
        comparison=pair,
        **facts,
    )


def test_what_was_never_timed_is_timed_once_so_far_and_alone(tmp_path):
    lab, measured, world = known(tmp_path)

    stages = lab.drive(measure_stages(measured))

    assert [stage.technique for stage in stages] == ["", "loader_workers", "bf16_autocast"]
    assert [stage.source for stage in stages] == ["pairs", "run", "pairs"]
    # Against the rate of the first row, which the proof gives, not against that of the first run.
    assert stages[1].alone == pytest.approx(stages[1].samples_per_s / stages[0].samples_per_s)
    assert stages[2].alone == pytest.approx(2.0 * 160 / stages[0].samples_per_s)
    assert world.asked == ["loader_workers", "bf16_autocast"]


def test_what_pairs_have_shown_is_taken_from_them(tmp_path):
    rows = (
        row(
            WORKERS, 1.3, samples_per_s=21.0, device_busy_share=0.7, peak_bytes=PeakBytes(device=9)
        ),
        row(BF16, 1.9, on_top_of=("loader_workers",)),
    )
    lab, measured, world = known(tmp_path, *rows)

    baseline, workers, bf16 = lab.drive(measure_stages(measured))

    assert (workers.alone, workers.alone_source) == (1.3, "pairs")
    # The machine was slower in those pairs than in the proof: not the 21 samples/s of that time.
    assert workers.samples_per_s == pytest.approx(1.3 * baseline.samples_per_s)
    assert (workers.utilisation, workers.peak_bytes) == (0.7, 9)
    assert world.asked == ["bf16_autocast"], "only what it gives alone was not known"
    assert bf16.alone_source == "run"


def test_without_time_a_screen_says_what_it_saw_and_the_rest_stays_unknown(tmp_path):
    rows = (row(WORKERS, 1.2, source="screen"), row(BF16, 1.9, source="screen"))
    lab, measured, world = known(tmp_path, *rows, left_s=-1.0)

    baseline, bf16, _ = lab.drive(measure_stages(measured))

    assert world.asked == []
    assert (bf16.samples_per_s, bf16.utilisation) == (None, None)
    assert (bf16.alone, bf16.alone_source) == (1.9, "screen")
    assert baseline.samples_per_s == pytest.approx(profile(40.0).samples_per_s / PROOF.ratio)


def test_of_what_a_screen_proposed_the_largest_effect_goes_first(tmp_path):
    fused = Choice(technique="fused_optimizer")
    rows = (
        row(WORKERS, 1.2, source="screen"),
        row(BF16, 1.9, source="screen"),
        row(fused, 2.5, on_top_of=("loader_workers", "bf16_autocast")),
    )
    lab, measured, world = known(tmp_path, *rows, recipe=RECIPE.plus(fused))

    stages = lab.drive(measure_stages(measured))

    names = [stage.technique for stage in stages]
    assert names == ["", "bf16_autocast", "loader_workers", "fused_optimizer"]
    # The first row of a technique shows it alone: it is not run again for that.
    assert world.asked == [
        "bf16_autocast",
        "loader_workers + bf16_autocast",
        "loader_workers",
        "fused_optimizer",
    ]


def test_first_and_last_row_are_as_far_apart_as_the_proof_says(tmp_path):
    # The unchanged script's first run would say 100 / 40 = 2.5.
    baseline, *_, last = stages_of(tmp_path)

    assert last.source == "pairs"
    assert last.samples_per_s == profile(40.0).samples_per_s, "what the data are compared with, too"
    assert last.samples_per_s / baseline.samples_per_s == pytest.approx(PROOF.ratio)


def test_a_recipe_of_one_technique_has_one_ratio(tmp_path):
    _, only = stages_of(tmp_path, recipe=Recipe(choices=(BF16,)))

    assert (only.alone, only.alone_source) == (PROOF.ratio, "pairs")


def test_a_trial_that_fails_leaves_its_row_without_a_number(tmp_path):
    lab, measured, world = known(tmp_path)
    world.broken = ("loader_workers",)

    stage = lab.drive(measure_stages(measured))[1]

    assert (stage.samples_per_s, stage.alone) == (None, None)


def test_ctrl_c_ends_the_measuring_and_keeps_the_rows(tmp_path):
    lab, measured, world = known(tmp_path)
    world.interrupt_after = 1

    stages = lab.drive(measure_stages(measured))

    assert len(stages) == 3
    assert stages[1].samples_per_s is not None
    assert stages[2].alone is None


def test_a_busy_machine_ends_the_measuring(tmp_path, monkeypatch):
    lab, measured, _ = known(tmp_path)

    def busy(*_args, **_options):
        raise MachineBusyError

    monkeypatch.setattr(TrialHistory, "time", busy)

    assert [stage.samples_per_s is None for stage in lab.drive(measure_stages(measured))] == [
        False,
        True,
        False,
    ]


def test_gpu_util_is_what_the_table_shows_on_a_gpu(tmp_path):
    on_gpu = replace(profile(100.0), gpu_util_share=0.35)
    lab, measured, _ = known(
        tmp_path, baseline=on_gpu, final=replace(profile(40.0), gpu_util_share=0.9)
    )

    stages = lab.drive(measure_stages(measured))

    assert (stages[0].utilisation, stages[-1].utilisation) == (0.35, 0.9)


def test_no_table_without_a_proven_recipe(tmp_path):
    assert stages_of(tmp_path, confirmation=None) == ()
    assert stages_of(tmp_path, recipe=Recipe()) == ()


def test_what_a_script_needs_to_run_is_part_of_the_unchanged_script(tmp_path):
    lab, measured, _ = known(tmp_path, floor=Recipe(choices=(WORKERS,)))

    assert [stage.technique for stage in lab.drive(measure_stages(measured))] == [
        "",
        "bf16_autocast",
    ]


def test_a_tuning_measures_its_recipe_as_it_grows(tmp_path):
    ablation = run(World(FACTORS), tmp_path)

    assert {stage.technique.split()[0] for stage in ablation.stages[1:]} == set(
        ablation.recipe.names
    )
    speeds = [stage.samples_per_s for stage in ablation.stages]
    assert speeds == sorted(speeds)
    whole = ablation.stages[-1].samples_per_s / ablation.stages[0].samples_per_s
    assert whole == pytest.approx(ablation.confirmation.ratio)


def test_the_length_is_read_from_the_script_that_runs(tmp_path):
    (tmp_path / "train.py").write_text("max_iters = 5000\n")
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text("max_iters = 70\n")

    script = Workload(target="train.py", folder=tmp_path, python="python")
    module = Workload(target="-m pkg.train", folder=tmp_path, python="python")

    assert length_of(script, profile(100.0)).steps == 5000
    assert length_of(module, profile(100.0)).steps == 70
    assert source_of(Workload(target="gone.py", folder=tmp_path, python="python")) == ""


SCRIPT = """
import time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

class Remote(Dataset):
    def __len__(self):
        return 1600

    def __getitem__(self, index):
        time.sleep(0.002)
        return torch.full((64,), float(index % 7)), index % 10

loader = DataLoader(Remote(), batch_size=16)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
for epoch in range(40):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.measures
def test_the_stages_of_a_real_script_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("flatout.tuning.experiments.disturbances", lambda *_: "")
    (tmp_path / "train.py").write_text(SCRIPT)
    workload = Workload(target="train.py", folder=tmp_path, python=sys.executable)
    machine = read_machine(torch=False)
    lab = TrialRunner(workload=workload, machine=machine, out=tmp_path, limit_s=120.0)
    cache = Choice(technique="ram_cache", settings={"fill_s": 10.0, "memory_share": 0.5})
    fused = Choice(technique="fused_optimizer")
    recipe = Recipe(choices=(cache, fused))

    first, final = lab.time(Recipe()).profile, lab.time(recipe).profile

    asked = measure_stages(
        Measured(
            history=lab.history,
            baseline=first,
            floor=Recipe(),
            recipe=recipe,
            rows=(),
            final=final,
            confirmation=replace(PROOF, ratio=final.samples_per_s / first.samples_per_s),
            left_s=lambda: 100.0,
        )
    )
    stages = lab.drive(asked)

    _, cached, both = stages
    assert cached.source == "run"
    assert cached.alone > 2, "each sample sleeps for 2 ms until it is kept"
    assert both.alone is not None
    assert all(stage.samples_per_s and stage.peak_bytes for stage in stages)
    assert length_of(workload, lab.time(Recipe()).profile).steps == 4000


class Packed(World):
    """Someone ends the tuning while packed samples stand for all data."""

    def __call__(self, workload, recipe, machine, options):
        if "packed_data" in recipe.names:
            self.asked.append("packed")
            raise KeyboardInterrupt
        return super().__call__(workload, recipe, machine, options)


def test_after_ctrl_c_no_stage_is_measured_and_those_that_are_known_are_shown(tmp_path):
    sample = StoredSample(choice=Choice(technique="packed_data"), samples=8, mean_bytes=1.0)
    task = TuningTask(machine=MACHINE, only=tuple(FACTORS), stored_sample=sample)
    world = Packed(FACTORS)
    lab = TrialRunner(workload=WORKLOAD, machine=MACHINE, out=tmp_path, limit_s=60.0, runner=world)
    lab.judge = lambda _asked: Judgement(check=LossCheck(status="within"))

    tuned = lab.drive(tuning(task, budget_of(task), lambda _: None))

    assert tuned.state.stopped == "interrupted"
    assert world.asked[-1] == "packed"
    assert len(tuned.stages) == 3
