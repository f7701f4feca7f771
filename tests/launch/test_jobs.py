import contextlib
import json
import os
import subprocess
import sys
import time

import pytest

from flatout.agent.journal_file import BESIDE
from flatout.launch import trial_folders
from flatout.launch.rollback import restore
from flatout.launch.trial_folders import (
    announce,
    find_job,
    forget_ended,
    has_ended,
    lives,
    started_ticks,
)
from flatout.launch.trial_process import RANK_LAUNCHER, clean_up_stale_trials
from flatout.records.errors import UserError
from flatout.records.files import module_command
from tests.launch.test_trial_process import ended_process
from tests.paths import ROOT

SOURCE = ROOT / "src"


def test_a_job_that_was_announced_is_found_and_lives(tmp_path):
    announce(tmp_path, "run", "train.py")

    facts = find_job(tmp_path)

    assert (facts["owner"], facts["kind"], facts["workload"]) == (os.getpid(), "run", "train.py")
    assert lives(facts)


def test_a_number_that_another_process_has_now_is_no_life(tmp_path):
    announce(tmp_path, "run", "train.py")
    facts = find_job(tmp_path)

    assert not lives(facts | {"owner_started": facts["owner_started"] - 1})


def test_where_proc_is_hidden_a_job_is_still_found_alive_and_dead(tmp_path, monkeypatch):
    monkeypatch.setattr(trial_folders, "started_ticks", lambda _: None)
    announce(tmp_path, "run", "train.py")
    facts = find_job(tmp_path)

    assert facts["owner_started"] is None
    assert lives(facts)
    assert not lives(facts | {"owner": ended_process()})


ANOTHER_MACHINE = {"host": "node2", "boot_id": "b2"}
ANOTHER_CONTAINER = {"host": "4f1c", "pid_namespace": "pid:[1]"}


@pytest.mark.parametrize("elsewhere", [ANOTHER_MACHINE, ANOTHER_CONTAINER])
def test_of_a_job_of_another_machine_or_container_nothing_is_known(tmp_path, elsewhere):
    announce(tmp_path, "run", "train.py")
    facts = find_job(tmp_path) | elsewhere

    assert not lives(facts)
    assert not has_ended(facts)
    assert not has_ended(facts | {"owner": ended_process()})


def test_what_ran_before_this_machine_was_started_anew_has_ended(tmp_path):
    announce(tmp_path, "run", "train.py")
    facts = find_job(tmp_path) | {"boot_id": "an earlier one"}

    assert not lives(facts)
    assert has_ended(facts)


@pytest.mark.parametrize("host", ["here", "node2"])
def test_where_boots_have_no_name_the_hosts_name_decides(tmp_path, monkeypatch, host):
    monkeypatch.setattr(trial_folders, "boot_id", lambda: None)
    announce(tmp_path, "run", "train.py")
    facts = find_job(tmp_path)
    if host != "here":
        facts |= {"host": host}

    assert lives(facts) == (host == "here")
    assert has_ended(facts | {"owner": ended_process()}) == (host == "here")


def test_an_announcement_of_an_older_flatout_counts_here():
    facts = {"owner": os.getpid(), "owner_started": started_ticks(os.getpid())}

    assert lives(facts)
    assert has_ended(facts | {"owner": ended_process()})


def test_an_ended_process_started_never(tmp_path):
    assert started_ticks(ended_process()) is None


def test_a_folder_without_an_announcement_is_no_job(tmp_path):
    (tmp_path / "job.json").write_text('{"owner": 1')

    assert find_job(tmp_path) is None
    assert find_job(tmp_path / "none") is None


def test_runs_of_a_killed_flatout_are_removed_and_running_ones_stay(tmp_path):
    names = [f"{kind}-{fate}" for kind in ("run", "ranks") for fate in ("dead", "alive", "far")]
    for name in names:
        (tmp_path / name).mkdir()
        announce(tmp_path / name, "run", "train.py")
    facts = find_job(tmp_path / "run-dead") | {"owner": ended_process()}
    for kind in ("run", "ranks"):
        (tmp_path / f"{kind}-dead/job.json").write_text(json.dumps(facts))
        (tmp_path / f"{kind}-far/job.json").write_text(json.dumps(facts | ANOTHER_MACHINE))

    forget_ended(tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {
        name for name in names if "dead" not in name
    }


def test_what_starts_ranks_and_is_killed_leaves_a_folder_that_the_next_command_removes(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    # Torch is asked for once the folder is there: the import stands for the time of a training.
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(600)\n")
    command = module_command(sys.executable, RANK_LAUNCHER, "2", "0", "0", "train.py")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{SOURCE}"}
    launcher = subprocess.Popen(command, env=environment)
    while not list(tmp_path.glob("flatout/ranks-*/job.json")):
        assert launcher.poll() is None
        time.sleep(0.01)

    clean_up_stale_trials()
    kept = list(tmp_path.glob("flatout/ranks-*"))
    launcher.kill()
    launcher.wait()
    clean_up_stale_trials()

    assert len(kept) == 1
    assert list(tmp_path.glob("flatout/ranks-*")) == []


@pytest.mark.parametrize("kind", ["pipe", "endless", "no number", "deep", "digits"])
def test_an_announcement_that_is_no_such_file_is_no_job(tmp_path, kind):
    path = tmp_path / "job.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "endless":
        path.symlink_to("/dev/zero")
    else:
        text = {"no number": '"a"', "deep": "[" * 90_000, "digits": "9" * 5_000}[kind]
        path.write_text('{"kind": "run", "workload": "t", "began_at": 1, "owner": ' + text + "}")

    assert find_job(tmp_path) is None


def test_no_trial_begins_where_a_killed_one_left_originals_in_a_folder_below(tmp_path, monkeypatch):
    (tmp_path / "work/deep/down").mkdir(parents=True)
    (tmp_path / "work/deep/down/.flatout-journal-trial-x").write_text("")
    monkeypatch.setattr(trial_folders, "can_overlay", lambda *_: False)

    with (
        pytest.raises(UserError, match="put them back first: flatout restore"),
        trial_folders.hold_working_folder(tmp_path / "work", tmp_path, is_free=False),
    ):
        pass


def test_a_damaged_journal_with_a_name_that_is_too_long_is_no_internal_error(tmp_path):
    line = ["renamed", str(tmp_path / "a"), str(tmp_path / ("x" * 5_000) / "b"), 5, 10]
    (tmp_path / f"{BESIDE}trial-x").write_text(json.dumps(line) + "\n")

    with contextlib.suppress(UserError):
        restore(tmp_path)
