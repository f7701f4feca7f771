import fcntl
import json
import os
import subprocess
import sys
import time

import pytest

from flatout.launch.supervisor import (
    ENDED_GRACE_S,
    GRACE_S,
    KEPT_LOG_BYTES,
    MAX_LOG_BYTES,
    _bound,
    _Results,
    _watch,
)

BEATS = """
import sys, time
time.sleep(0.5)
for count in range(int(sys.argv[2])):
    with open(sys.argv[1], "r+b") as memory:
        memory.write(bytes([count]))
    time.sleep(0.25)
if sys.argv[3] == "hang":
    time.sleep(600)
"""
"""A training that lives longer than it may be silent, and goes to sleep for good or ends."""


def write(folder, number, why):
    (folder / f"result-{number}.json").write_text(json.dumps({"why": why}))


def test_without_a_result_nothing_is_old(tmp_path):
    assert not _Results(tmp_path).are_old(1e9)


def test_trainer_that_was_stopped_leaves_its_launcher_little_time(tmp_path):
    write(tmp_path, 1, "done")
    results = _Results(tmp_path)

    assert not results.are_old(100.0)
    assert results.are_old(100.1 + GRACE_S)


def test_trainer_that_ended_by_itself_may_have_failed_and_its_launcher_tells_later(tmp_path):
    write(tmp_path, 1, "script_ended")
    results = _Results(tmp_path)

    assert not results.are_old(100.0)
    assert not results.are_old(100.1 + GRACE_S)
    assert results.are_old(100.1 + ENDED_GRACE_S)


def test_stopped_trainer_counts_more_than_one_that_ended(tmp_path):
    write(tmp_path, 1, "script_ended")
    results = _Results(tmp_path)
    results.are_old(100.0)

    write(tmp_path, 2, "done")
    results.are_old(101.0)

    assert results.are_old(101.1 + GRACE_S)


@pytest.mark.chaos
@pytest.mark.parametrize(("then", "why"), [("end", "ended"), ("hang", "hang")])
def test_only_silence_is_a_hang_however_long_a_training_takes(tmp_path, then, why):
    life_line, our_end = os.pipe()
    beats = ["-c", BEATS, str(tmp_path / "heartbeat"), "32", then]
    child = subprocess.Popen([sys.executable, "-S", *beats])
    spec = {"folder": tmp_path, "limit_s": 100.0, "hang_s": 6.0, "life_line": life_line}
    began = time.monotonic()

    ending = _watch(child, spec, began)

    took_s = time.monotonic() - began
    child.kill()
    child.wait()
    os.close(life_line)
    os.close(our_end)
    assert ending["why"] == why
    assert took_s > 8.0


HELD_S = 6.0
WAITS = """
import fcntl, os, sys
from flatout.launch import overlay, supervisor

def refuse(*_):
    raise OSError("this kernel allows none")

overlay.enter_overlay = refuse
fcntl.flock(int(sys.argv[2]), fcntl.LOCK_SH)
print("waits", flush=True)
supervisor.main(["", sys.argv[1]])
"""


def test_the_time_in_which_another_trial_holds_the_folder_is_none_of_the_trials(tmp_path):
    life_line, our_end = os.pipe()
    ours, theirs = os.open(tmp_path, os.O_RDONLY), os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(ours, fcntl.LOCK_SH)
    spec = {
        "folder": str(tmp_path),
        "cwd": str(tmp_path),
        "child_spec": str(tmp_path / "child.json"),
        "child": {"not_journaled": []},
        "argv": ["sleep", "0.2"],
        "overlay": True,
        "lock": theirs,
        "passed": [],
        "life_line": life_line,
        "limit_s": HELD_S / 2,
        "hang_s": HELD_S / 2,
    }
    (tmp_path / "spec.json").write_text(json.dumps(spec))

    with subprocess.Popen(
        [sys.executable, "-c", WAITS, str(tmp_path / "spec.json"), str(theirs)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(life_line, theirs),
    ) as supervisor:
        supervisor.stdin.write(b"{}")
        supervisor.stdin.close()
        supervisor.stdout.readline()
        time.sleep(HELD_S)
        fcntl.flock(ours, fcntl.LOCK_UN)

    for number in (life_line, our_end, ours, theirs):
        os.close(number)
    ending = json.loads((tmp_path / "ending.json").read_text())
    assert (ending["why"], ending["exit_code"], ending["is_overlaid"]) == ("ended", 0, False)
    assert ending["wall_s"] < HELD_S


def test_a_log_that_grows_too_long_keeps_its_end(tmp_path):
    log = tmp_path / "log"
    with log.open("ab") as script:
        script.write(b"early" + bytes(MAX_LOG_BYTES))
        script.write(b"the end")
        script.flush()
        _bound(log)
        script.write(b", and more")

    assert log.stat().st_size == KEPT_LOG_BYTES + len(b", and more")
    assert log.read_bytes().endswith(b"the end, and more")


def test_a_log_of_ordinary_length_is_left_alone(tmp_path):
    (tmp_path / "log").write_bytes(b"hello")

    _bound(tmp_path / "log")

    assert (tmp_path / "log").read_bytes() == b"hello"
