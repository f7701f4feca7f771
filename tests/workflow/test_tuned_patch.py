"""A whole tuning that writes its recipe as a diff: the diff does what the recipe did."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from flatout.cli import call, tuning_output
from flatout.hardware.machine import read_machine
from flatout.launch.workloads import parse_workload
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import run_trial
from flatout.workflow.recipe_files import read_recipe
from flatout.workflow.tune import tune
from tests.support.programs import ran

SCRIPT = """\
import time

import torch
from torch.utils.data import DataLoader, Dataset


class Remote(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, index):
        time.sleep(0.02)  # samples come over a network
        x = torch.full((8,), index / 4096)
        return x, x.sum(dim=0, keepdim=True)


torch.manual_seed(0)
loader = DataLoader(Remote(), batch_size=8, shuffle=True)  # far away
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, (x, y) in enumerate(loader):
    loss = torch.nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print("loss", loss.item())
    if step == 150:
        break
"""


def undisturbed(workload, recipe, machine, options):
    """Run a trial as it is, whatever else the machine does: the gain is far above any noise."""
    trial = run_trial(workload, recipe, machine, options)
    profile = trial.profile and replace(trial.profile, invalid=())
    return replace(trial, profile=profile, details={**trial.details, "load": {}})


def losses_of(*command):
    done = ran(command, check=True)
    return [float(x.split()[1]) for x in done.stdout.splitlines() if x.startswith("loss")]


def step_ms(target):
    trial = run_trial(parse_workload(target, ()), Recipe(), read_machine(torch=False))
    return trial.profile.whole_step_ms


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_patch_of_a_tuning_trains_the_same_at_the_speed_that_was_proven(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        tuning_output,
        "tune",
        lambda workload, options, tell: tune(workload, replace(options, runner=undisturbed), tell),
    )
    (tmp_path / "train.py").write_text(SCRIPT)

    code = call(["tune", "--patch", "--budget", "12m", "--only", "loader_workers", "train.py"])

    assert code == 0
    recipe = read_recipe(tmp_path / "flatout-out/recipe.toml")
    assert recipe.names == ("loader_workers",)
    under_recipe = losses_of(
        *(sys.executable, "-m", "flatout", "run", "--with", "flatout-out/recipe.toml", "train.py")
    )
    patched = tmp_path / "patched"
    patched.mkdir()
    (patched / "train.py").write_text(SCRIPT)
    diff = (tmp_path / "flatout-out/recipe.diff").read_text()
    subprocess.run(["git", "apply"], input=diff, text=True, check=True, cwd=patched)
    workers = recipe.choices[0].settings["num_workers"]
    assert f"shuffle=True, num_workers={workers}" in (patched / "train.py").read_text()

    assert len(under_recipe) == 151
    assert losses_of(sys.executable, "patched/train.py") == under_recipe
    best = json.loads((tmp_path / "flatout-out/ablation.json").read_text())["best"]
    assert step_ms("train.py") / step_ms("patched/train.py") > best["interval"][0] / 1.5

    def patched_for_recipe(workload, asked, machine, options):
        if asked != recipe:
            return run_trial(workload, asked, machine, options)
        own = replace(workload, folder=patched)
        return replace(run_trial(own, Recipe(), machine, options), recipe=asked)

    runner = TrialRunner(
        workload=parse_workload("train.py", ()),
        machine=read_machine(torch=False),
        out=tmp_path / "flatout-out",
        limit_s=300.0,
        runner=patched_for_recipe,
    )
    guard = GuardChecker(runner, lambda _text: None, ceiling=Numerics.EXACT)
    assert guard.check(recipe).status == "same"
