"""A script for one device on several: which way is timed, which is taken, and what is said."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from flatout import __version__
from flatout.records.ablation import Verdict
from flatout.records.messages import messages
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial
from flatout.reporting.tuning.verdict import headline, reasons
from tests.tuning.test_policy import check
from tests.workflow.test_tune import MACHINE, World, run

FLATOUT = str(Path(sys.executable).parent / "flatout")
SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = torch.utils.data.TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
for epoch in range(50):
    for x, y in torch.utils.data.DataLoader(data, batch_size=64, shuffle=True):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""


class Spread(World):
    """Each stage of ZeRO has a factor of its own."""

    def __post_init__(self):
        super().__post_init__()
        self.ways, self.ranks = {0: 0.55, 2: 0.7, 3: 2.0}, ()

    def __call__(self, workload, recipe, machine, options):
        zero = next((c.settings["zero"] for c in recipe.choices if "zero" in c.settings), None)
        self.factors["data_parallel"] = self.ways.get(zero, 1.0)
        self.ranks = (*self.ranks, (workload.ranks, zero))
        return super().__call__(workload, recipe, machine, options)


@pytest.fixture(autouse=True)
def guard(monkeypatch):
    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)


def spread_rows(ablation):
    return {
        row.choice.settings["zero"]: row.verdict for row in ablation.rows if row.stage == "spread"
    }


def test_the_fastest_way_is_the_baseline_of_all_that_follows(tmp_path):
    world = Spread({"loader_workers": 0.6})

    ablation = run(world, tmp_path, ranks=2, only=("loader_workers",))

    assert spread_rows(ablation) == {0: Verdict.KEPT, 2: Verdict.INCONCLUSIVE, 3: Verdict.WORSE}
    assert ablation.needed == ("data_parallel ranks=2 zero=0",)
    assert ablation.recipe.names == ("data_parallel", "loader_workers")
    assert ablation.recipe.num_ranks == 2
    assert ablation.confirmation.ratio == pytest.approx(1 / 0.6, rel=0.05)
    assert {ranks for ranks, zero in world.ranks if zero is not None} == {2}
    assert {ranks for ranks, zero in world.ranks if zero is None} == {1}
    assert "the baseline from here on is data_parallel ranks=2 zero=0" in " ".join(ablation.notes)


def test_where_no_way_is_faster_it_stays_on_one_device(tmp_path):
    world = Spread({"loader_workers": 0.6})
    world.ways = {0: 1.1, 2: 1.3, 3: 1.4}

    ablation = run(world, tmp_path, ranks=2, only=("loader_workers",))

    assert not ablation.needed
    assert not ablation.is_spread
    assert ablation.recipe.names == ("loader_workers",)
    assert any(note.startswith("stay on one device") for note in ablation.notes)


def test_a_small_gain_is_taken_and_said_to_be_small(tmp_path):
    world = Spread({})
    world.ways = {0: 0.9, 2: 1.2, 3: 1.2}

    ablation = run(world, tmp_path, ranks=8, only=("loader_workers",))

    assert ablation.is_spread
    assert "8 devices for that are hardly worth it" in " ".join(ablation.notes)
    said = messages("en").text(headline(ablation))
    assert said.startswith("Spread it, and change nothing else: with data_parallel ranks=8 zero=0")


def test_a_way_that_does_not_run_is_named_and_the_others_are_timed(tmp_path):
    ablation = run(Spread({}, broken=("data_parallel",)), tmp_path, ranks=2)

    assert set(spread_rows(ablation).values()) == {Verdict.FAILED}
    assert not ablation.is_spread
    assert any("no measurement (" in note for note in ablation.notes)


class Faulty(Spread):
    """A world in which one thing goes wrong at a moment of the spreading."""

    fault = ""

    def __call__(self, workload, recipe, machine, options):
        if self.fault == "busy":
            self.load = {"foreign_share": 0.7, "wall_s": 1.0}
        trial = super().__call__(workload, recipe, machine, options)
        spread = [zero for _, zero in self.ranks if zero is not None]
        if self.fault == "Ctrl-C" and len(spread) > 2:
            raise KeyboardInterrupt
        if self.fault == "gone" and spread.count(0) > 3 and recipe.names:
            return Trial(recipe=recipe, outcome=Outcome.CRASH, message="port in use", wall_s=1)
        is_offloaded = any(choice.settings.get("offload") for choice in recipe.choices)
        fits = {"memory": bool(recipe.names), "all memory": is_offloaded}
        if not fits.get(self.fault, True):
            return Trial(recipe=recipe, outcome=Outcome.OOM, message="out of memory", wall_s=1)
        return trial


def faulty(fault, **truth):
    world = Faulty({"loader_workers": 0.6}, **truth)
    world.fault = fault
    return world


def test_a_busy_machine_ends_with_a_table(tmp_path):
    ablation = run(faulty("busy"), tmp_path, ranks=2)

    assert ablation.stopped == "machine busy"
    assert not ablation.recipe.choices


def test_ctrl_c_while_ways_are_timed_ends_with_what_was_seen(tmp_path):
    ablation = run(faulty("Ctrl-C"), tmp_path, ranks=2)

    assert ablation.stopped == "interrupted"
    assert spread_rows(ablation)
    assert not ablation.is_spread


def test_a_way_that_does_not_run_once_more_is_not_called_the_baseline(tmp_path):
    world = faulty("gone")

    ablation = run(world, tmp_path, ranks=2)

    said = " ".join(ablation.notes)
    assert "did not run once more" in said
    assert "the baseline from here on" not in said
    assert not ablation.is_spread


@pytest.mark.parametrize("limit", [{"skip": ("data_parallel",)}, {"numerics": Numerics.EXACT}])
def test_what_the_user_forbids_is_not_tried(tmp_path, limit):
    world = faulty("")

    ablation = run(world, tmp_path, ranks=2, **limit)

    assert not spread_rows(ablation)
    assert any(note.startswith("not spread: ") for note in ablation.notes)


def test_every_way_gets_one_pair_before_any_gets_more(tmp_path):
    world = faulty("")

    run(world, tmp_path, ranks=2, only=("loader_workers",))

    spread = [zero for _, zero in world.ranks if zero is not None]
    assert spread[:3] == [0, 2, 3]


def test_what_one_device_is_too_small_for_is_spread(tmp_path):
    ablation = run(faulty("memory"), tmp_path, ranks=2, only=("loader_workers",))

    assert ablation.is_spread
    assert ablation.recipe.names == ("data_parallel", "loader_workers")
    assert "is the baseline from here on" in " ".join(ablation.notes)


def test_what_fits_in_no_other_way_is_offloaded_where_there_is_a_host_apart(tmp_path, monkeypatch):
    gpu = replace(MACHINE.device, kind="cuda")
    monkeypatch.setattr("tests.workflow.test_tune.MACHINE", replace(MACHINE, device=gpu))

    ablation = run(faulty("all memory"), tmp_path, ranks=2, only=("loader_workers",))

    assert ablation.recipe.choices[0].settings == {"ranks": 2, "zero": 3, "offload": True}


def test_of_what_one_device_is_too_small_for_nothing_faster_is_said(tmp_path):
    world = Faulty({})
    world.fault = "memory"

    ablation = run(world, tmp_path, ranks=2, only=("loader_workers",))

    said = messages("en").text(headline(ablation))
    assert said.startswith("It runs now: with data_parallel ranks=2 zero=0 it fits into memory")


def test_pairs_of_ways_say_nothing_of_how_techniques_were_tried(tmp_path):
    ablation = run(Spread({}), tmp_path, ranks=2, only=("tf32",))

    said = " ".join(messages("en").text(reason) for reason in reasons(ablation))
    assert spread_rows(ablation)
    assert "Resolution" not in said
    assert "Each technique was tried" not in said


def test_the_answer_says_what_its_ratio_is_measured_against(tmp_path):
    ablation = run(Spread({"loader_workers": 0.6}), tmp_path, ranks=2, only=("loader_workers",))

    said = messages("en").text(headline(ablation))
    assert "1 of 1 techniques kept on top of data_parallel ranks=2 zero=0 (1.8" in said


@pytest.mark.slow
def test_tune_and_run_spread_a_real_script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    given = {"cwd": tmp_path, "capture_output": True, "text": True, "timeout": 500}
    tune = [FLATOUT, "tune", "--ranks", "2", "--budget", "60s", "--accept-load"]
    done = subprocess.run([*tune, "--json", "t.json", "train.py"], check=False, **given)

    assert done.returncode == 0, done.stderr
    assert "data_parallel ranks=2 zero=0" in " ".join(done.stdout.split())

    (tmp_path / "recipe.toml").write_text(
        f'[flatout]\nversion = "{__version__}"\n'
        '[[technique]]\nname = "data_parallel"\nranks = 2\nzero = 0\n'
    )
    again = subprocess.run([FLATOUT, "run", "--with", "recipe.toml", "train.py"], **given)
    assert again.returncode == 0, again.stderr
