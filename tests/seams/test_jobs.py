import json
import os
import subprocess
import sys

from flatout.seams import jobs
from flatout.seams.jobs import announce, find_job, forget_ended, lives, started_ticks


def ended_process():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


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
    monkeypatch.setattr(jobs, "started_ticks", lambda _: None)
    announce(tmp_path, "run", "train.py")
    facts = find_job(tmp_path)

    assert facts["owner_started"] is None
    assert lives(facts)
    assert not lives(facts | {"owner": ended_process()})


def test_an_ended_process_started_never(tmp_path):
    assert started_ticks(ended_process()) is None


def test_a_folder_without_an_announcement_is_no_job(tmp_path):
    (tmp_path / "job.json").write_text('{"owner": 1')

    assert find_job(tmp_path) is None
    assert find_job(tmp_path / "none") is None


def test_runs_of_a_killed_flatout_are_removed_and_running_ones_stay(tmp_path):
    for name in ("run-killed", "run-alive"):
        (tmp_path / name).mkdir()
        announce(tmp_path / name, "run", "train.py")
    facts = find_job(tmp_path / "run-killed") | {"owner": ended_process()}
    (tmp_path / "run-killed/job.json").write_text(json.dumps(facts))

    forget_ended(tmp_path)

    assert [path.name for path in tmp_path.iterdir()] == ["run-alive"]
