"""The commands and the examples of the page on several GPUs, run with gloo."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.support.programs import ran

ROOT = Path(__file__).parents[2]
SECTION = "## From one GPU to many"
EXAMPLES = ROOT / "examples" / "parallel"
FLATOUT = str(Path(sys.executable).parent / "flatout")


def shown():
    """Return the commands of the page's first section, in ranks of the CPU instead of GPUs."""
    text = (ROOT / "docs/several-gpus.md").read_text(encoding="utf-8").partition(SECTION)[2]
    lines = text.partition("```sh\n")[2].partition("```")[0].splitlines()
    return [
        line if line.startswith("flatout plan") else line.replace("--gpus 4", "--ranks 2")
        for line in lines
    ]


def run(words, folder):
    return ran([FLATOUT, *words[1:]], cwd=folder, timeout=300)


def test_the_section_plans_before_it_trains():
    assert [line.split()[1] for line in shown()] == ["plan", "run", "run"]


@pytest.mark.slow
@pytest.mark.smoke
@pytest.mark.parametrize("number", range(3))
def test_the_commands_of_the_section_run(number, tmp_path):
    shutil.copy(EXAMPLES / "small_model.py", tmp_path / "train.py")

    done = run(shlex.split(shown()[number], comments=True), tmp_path)

    assert done.returncode == 0, done.stderr
    assert "Stay on one GPU" in done.stdout or "epoch 1 loss" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpu", "cause"),
    [
        ("small_model.py", "h100", "the step is too small"),
        ("slower_with_four.py", "rtx4090", "exposed communication over a slow link"),
    ],
)
def test_the_examples_belong_on_one_gpu_and_the_cause_is_named(name, gpu, cause, tmp_path):
    path = tmp_path / "plan.json"
    words = ["flatout", "plan", "--gpu", gpu, "--gpus", "4", "--json", str(path)]

    done = run([*words, str(EXAMPLES / name)], tmp_path)

    assert done.returncode == 0, done.stderr
    advice = json.loads(path.read_text())["advice"]
    assert (advice["ranks"], advice["asked"]) == (1, 4)
    assert cause in advice["cause"]
