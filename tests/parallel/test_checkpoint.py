"""Checkpoints: whole or not there, for any number of ranks, and nothing is trained twice."""

import json
import os
import subprocess
import sys

import pytest

from tests.parallel.ranks import run_cases
from tests.paths import ROOT

ROUTES = ("sharded", "replicated")
RUNS = (("first", 2), ("second", 4), ("third", 1), ("last", 2))


@pytest.mark.slow
def test_two_ranks_then_four_then_one_then_two_train_what_one_process_trains(tmp_path, monkeypatch):
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path / "saved"))
    found = {}
    for stop, world in RUNS:
        folder = tmp_path / stop
        folder.mkdir()
        names = [f"{route}_{stop}" for route in ROUTES]
        found = run_cases("tests.parallel.checkpoint_cases", world, folder, names)

    assert all("error" not in one for one in found.values()), found
    assert all(one["steps"] == 10 for one in found.values())
    assert all(one["parameter"] <= 1e-12 for one in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("kills", [5, pytest.param(100, marks=pytest.mark.timeout(900))])
def test_kills_lose_no_sample_and_change_no_weight(tmp_path, kills):
    done = subprocess.run(
        [sys.executable, "-m", "tests.parallel.kills", str(tmp_path), str(kills)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        timeout=900,
    )
    found = json.loads(done.stdout.splitlines()[-1])

    assert found["kills"] >= kills
    assert found["wrong_epochs"] == found["other_weights"] == 0
