"""A Task as a program: found in the user's file, trained to its end, measured like any script."""

import shutil
import subprocess
import sys

import pytest
import torch

from flatout.agent.task_runner import load_task, main
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.tuning.trials import TrialOptions, run_trial
from tests.paths import ROOT
from tests.support.trial_runs import machine

TASKS = """
import torch
from torch import nn
import flatout
from parts import Squares

def save(model):
    torch.save(model.state_dict(), "line.pt")

line = flatout.Task(
    name="line",
    model=lambda: nn.Linear(1, 1),
    data=Squares,
    loss=lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
    batch_size=8,
    epochs=3,
    device="cpu",
    finish=save,
)
endless = flatout.Task(**{**{f: getattr(line, f) for f in line.__slots__}, "steps": 100_000})
number = 7
"""
PARTS = """
import torch
from torch.utils.data import Dataset

class Squares(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.tensor([index / 64])
        return x, x * x
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "mytask.py").write_text(TASKS)
    (tmp_path / "job" / "parts.py").write_text(PARTS)
    return tmp_path


@pytest.fixture
def clean_imports(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("mytask", "parts"):
        sys.modules.pop(name, None)


def run(folder, target):
    return subprocess.run(
        [sys.executable, "-m", "flatout.agent.task_runner", target],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def trial(folder, name, recipe=Recipe()):
    workload = Workload(
        target=f"job/mytask.py:{name}", folder=folder, python=sys.executable, is_task=True
    )
    return run_trial(workload, recipe, machine(), TrialOptions(limit_s=120.0))


def test_a_task_trains_to_its_end_and_finishes(folder):
    done = run(folder, "job/mytask.py:line")

    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("line: epoch 2 loss ")
    assert done.stdout.splitlines()[-1].endswith("24 steps")
    assert set(torch.load(folder / "line.pt")) == {"weight", "bias"}


def test_a_missing_task_names_the_nearest_one(folder):
    done = run(folder, "job/mytask.py:lien")

    assert (done.returncode, done.stdout) == (2, "")
    assert "did you mean 'line'?" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_something_else_than_a_task_says_what_it_is(folder, clean_imports, capsys):
    assert main([str(folder / "job/mytask.py:number")]) == 2

    said = capsys.readouterr().err
    assert "number is a int and not a flatout.Task" in said
    assert "Tasks there are: endless, line" in said


@pytest.mark.parametrize("target", ["mytask.py", ":line", "mytask.py:"])
def test_half_a_target_is_refused(target, capsys):
    assert main([target]) == 2

    assert "write file.py:name" in capsys.readouterr().err


def test_a_missing_file_is_refused(tmp_path, capsys):
    assert main([f"{tmp_path / 'nothing_here.py'}:line"]) == 2

    assert "is not a Python file" in capsys.readouterr().err


def test_a_file_named_like_a_module_in_use_is_refused(folder, capsys):
    shutil.copy(folder / "job/mytask.py", folder / "torch.py")

    assert main([f"{folder / 'torch.py'}:line"]) == 2

    assert "give the file another name" in capsys.readouterr().err


def test_no_argument_at_all_is_refused(capsys):
    assert main([]) == 2

    assert "give one task" in capsys.readouterr().err


def test_an_error_in_the_user_s_file_is_shown_as_python_shows_it(folder):
    (folder / "broken.py").write_text("import flatout\n1 / 0\n")

    done = run(folder, "broken.py:line")

    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.slow
def test_a_task_is_measured_like_a_script(folder):
    result = trial(folder, "endless")

    assert result.outcome is Outcome.OK, result.message + result.traceback
    assert result.details["errors"] == []
    profile = result.profile
    assert profile.samples_per_step == 8
    assert [loader.dataset for loader in profile.training_loaders] == ["Squares"]
    assert profile.models[0].name == "Linear"
    assert not (folder / "line.pt").exists()


@pytest.mark.slow
def test_techniques_reach_a_task_through_the_same_hook_points(folder):
    workers = Choice(technique="loader_workers", settings={"num_workers": 1, "prefetch_factor": 2})

    result = trial(folder, "endless", Recipe(choices=(workers,)))

    assert result.outcome is Outcome.OK, result.message + result.traceback
    assert result.not_applied == ()
    assert result.profile.training_loaders[0].workers == 1


def test_the_example_is_a_task(clean_imports):
    task = load_task(str(ROOT / "examples/task.py:guess"))

    assert (task.name, task.batch_size, task.steps) == ("guess", 64, 2_000)
    assert task.loss(task.model(), task.data()[:8]).item() == pytest.approx(5.55, abs=0.3)
    del sys.modules["task"]
