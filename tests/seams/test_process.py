"""How a child process is set up and what killed ones leave, without starting one."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from flatout.core.errors import UserError
from flatout.seams import jobs
from flatout.seams.process import mend_leftovers, not_journaled, scratch_root


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


def test_a_trial_planted_in_a_shared_folder_is_not_rolled_back(monkeypatch, tmp_path):
    (tmp_path / "cache").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    planted = tmp_path / f"flatout-{os.getuid()}"
    planted.mkdir()
    planted.chmod(0o777)

    with pytest.raises(UserError, match="other users can write to"):
        mend_leftovers()


def test_a_relative_cache_folder_is_not_made_in_the_users_project(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")

    root = scratch_root()

    assert root == tmp_path / "home/.cache/flatout"


def test_without_a_cache_folder_trials_go_to_a_private_one_in_tmp(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    root = scratch_root()

    assert root == tmp_path / f"flatout-{os.getuid()}"
    assert root.stat().st_mode & 0o777 == 0o700
