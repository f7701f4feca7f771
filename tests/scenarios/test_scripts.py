"""The scenarios are training scripts that work: they learn, evaluate, save, and repeat."""

import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.paths import ROOT
from tests.support.programs import python

SCENARIOS = ROOT / "scenarios"
GPT = "--limit 200000 --context 16 --layers 1 --width 32 --heads 2 --evals 2 --epoch-steps 8"
SMALL = {
    "starved_images/train.py": "--data photographs --image-size 32 --width 4 --batch-size 8",
    "slow_compute/train.py": GPT,
    "naive_attention/train.py": GPT,
    "already_tuned/train.py": "--limit 200000 --context 8 --width 64 --batch-size 64"
    " --epoch-steps 8",
    "slow_compute/hand_tuned.py": GPT,
}
TRAINING = [name for name in SMALL if name.endswith("train.py")]
EPOCHS = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working folder with a few photographs."""
    folder = tmp_path_factory.mktemp("work")
    command = [sys.executable, SCENARIOS / "photographs.py", "photographs", "--count", "72"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    return folder


@functools.cache
def train(folder, script, options):
    """Run one scenario in its tiny form and return what it printed."""
    words = [*SMALL[script].split(), *options.split(), "--log-every", "1"]
    done = python(
        ["-W", "error", SCENARIOS / script, *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def train_long(folder, script):
    return train(folder, script, f"--epochs {EPOCHS} --lr 0.003 --out {Path(script).parent}")


def losses(printed):
    return [float(value) for value in re.findall(r"step \d+ loss (\S+)", printed)]


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING)
def test_it_evaluates_and_saves_at_the_end_of_an_epoch(folder, script):
    printed = train_long(folder, script)

    evaluations = re.findall(r"^epoch (\d+) validation loss [\d.]+", printed, re.MULTILINE)
    assert evaluations == [str(epoch) for epoch in range(EPOCHS)]
    assert torch.load(folder / Path(script).parent / "checkpoint.pt")["model"]


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING)
def test_it_learns(folder, script):
    found = losses(train_long(folder, script))

    assert sum(found[-8:]) < 0.95 * sum(found[:8])


@pytest.mark.slow
@pytest.mark.parametrize("script", TRAINING)
def test_it_repeats_itself_and_stops_after_the_steps_it_is_given(folder, script):
    whole = losses(train_long(folder, script))

    assert losses(train(folder, script, "--steps 6 --lr 0.003")) == whole[:6]


@pytest.mark.slow
def test_the_hand_tuned_version_does_the_same_training_and_logs_its_steps(folder):
    log = folder / "steps.jsonl"
    plain = losses(train_long(folder, "slow_compute/train.py"))

    options = f"--steps 4 --lr 0.003 --log {log}"
    tuned = losses(train(folder, "slow_compute/hand_tuned.py", options))

    assert tuned == pytest.approx(plain[:4], rel=0.01)
    assert [line.partition(",")[0] for line in log.read_text().splitlines()] == [
        f'{{"step": {number}' for number in (1, 2, 3, 4)
    ]


@pytest.mark.parametrize("path", sorted(SCENARIOS.rglob("*.py")), ids=lambda path: path.stem)
def test_no_scenario_knows_flatout(path):
    assert "flatout" not in path.read_text()
