"""How a child process is set up and what killed ones leave, without starting one."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.seams import jobs
from flatout.seams.process import mend_leftovers, not_journaled


def test_tritons_own_cache_is_kept_from_trial_to_trial():
    assert str(Path.home() / ".triton") in not_journaled({})
    assert "/data/.triton" in not_journaled({"TRITON_HOME": "/data"})


def ended_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def leave_trial(cache, **facts):
    """Leave the folder of a trial whose flatout is gone, and return it."""
    folder = cache / "flatout/trial-left"
    folder.mkdir(parents=True)
    spec = {**jobs.owner(), "owner": ended_process(), **facts}
    (folder / "supervisor.json").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize(
    "elsewhere",
    [
        {"host": "node2", "boot_id": "another", "owner_started": 1},
        {"host": "4f1c", "pid_namespace": "pid:[1]", "owner_started": 1},
    ],
)
def test_a_trial_of_another_machine_or_container_is_left_alone(monkeypatch, tmp_path, elsewhere):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = leave_trial(tmp_path, **elsewhere)

    mend_leftovers()

    assert folder.exists()


@pytest.mark.parametrize("before", [{}, {"boot_id": "an earlier one"}])
def test_a_trial_that_ended_here_or_before_this_boot_is_cleared_away(monkeypatch, tmp_path, before):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = leave_trial(tmp_path, **before)

    mend_leftovers()

    assert not folder.exists()


def test_a_trial_that_an_older_flatout_left_is_cleared_away(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = leave_trial(tmp_path)
    (folder / "supervisor.json").write_text(json.dumps({"owner": ended_process()}))

    mend_leftovers()

    assert not folder.exists()
