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


@pytest.fixture
def cases(tmp_path, monkeypatch):
    """Return what a case gives on two ranks."""
    monkeypatch.setenv("CHECKPOINTS", str(tmp_path / "saved"))

    def found(name):
        case = run_cases("tests.parallel.checkpoint_cases", 2, tmp_path, [name])[name]
        assert "error" not in case, case["error"]
        return case

    return found


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(cases):
    found = cases("damaged")

    both, whole = found.pop("both"), found.pop("whole")
    assert whole == 4
    assert set(found.values()) == {2}
    assert len(found) >= 4 * 4  # two ranks' tensors, their description, and the numbers
    assert "every checkpoint in" in both
    assert "step-000000002: .metadata is not as it was written" in both


@pytest.mark.slow
def test_a_full_disk_ends_no_training_and_costs_no_checkpoint(cases):
    found = cases("full_disk")

    assert "No space left on device" in found.pop("last")
    written = {name: one["written"] for name, one in found.items()}
    assert written == {
        "flatout.parallel.checkpoint._sum_of 0": 1,
        "flatout.parallel.checkpoint._sum_of 1": 1,
        "os.fsync 0": 1,
        "os.fsync 1": 1,
        "pathlib.Path.rename 0": 1,
        "pathlib.Path.rename 1": 7,  # only rank 0 gives names
    }
    assert [one["steps"] for one in found.values()] == [2, 3, 4, 5, 6, 7]
    for one in found.values():
        assert one["names"][-1] == f"step-{one['written']:09d}"
        assert one["drafts"] == []


@pytest.mark.slow
def test_a_checkpoint_of_a_stranger_runs_no_code_and_leads_nowhere(cases):
    found = cases("hostile")

    assert "wants to load" in found["code"]
    assert "leads to ../other" in found["path"]
    assert not found["ran"]


@pytest.mark.slow
def test_two_trainings_do_not_write_into_one_folder(cases):
    found = cases("held_by_another")

    assert "another training writes its checkpoints there" in found["while"]
    assert found["after"] == 0


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
