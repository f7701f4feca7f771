"""Signals to the commands that run a script: its files are as before, and nothing goes on."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.slow]

SCRIPT = """
import os, sys, time
from pathlib import Path
Path("model.pt").write_text("of the trial")
os.remove("kept.txt")
Path(os.environ["TMPDIR"], "ready").write_text(str(os.getpid()))
time.sleep(300)
"""
COMMANDS = {
    "measure": ["measure"],
    "tune": ["tune", "--out", "../out"],
    "plan": ["plan", "--gpu", "h100"],
    "roofline": ["roofline"],
}
SENT = {
    "SIGINT": ((signal.SIGINT,), 130),
    "SIGINT twice": ((signal.SIGINT, signal.SIGINT), 130),
    "SIGTERM": ((signal.SIGTERM,), 143),
    "SIGTERM, then SIGINT": ((signal.SIGTERM, signal.SIGINT), 143),
    "SIGHUP": ((signal.SIGHUP,), 129),
    "SIGQUIT": ((signal.SIGQUIT,), -signal.SIGQUIT),
    "SIGKILL": ((signal.SIGKILL,), -signal.SIGKILL),
}
CASES = [("measure", name) for name in SENT]
CASES += [
    (name, sent) for name in ("tune", "plan", "roofline") for sent in ("SIGINT twice", "SIGTERM")
]
AT_ONCE = {"SIGQUIT", "SIGKILL", "SIGTERM, then SIGINT"}
"""flatout itself may have no time then: the process between it and the script does the rest."""


def await_(fact, limit_s=60.0):
    ends_at = time.monotonic() + limit_s
    while not fact():
        assert time.monotonic() < ends_at
        time.sleep(0.05)


def heeding():
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)  # the tests themselves may run under nohup


@pytest.fixture
def work(tmp_path):
    folder = tmp_path / "work"
    for made in (folder, tmp_path / "tmp", tmp_path / "cache"):
        made.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "model.pt").write_text("the user's")
    (folder / "kept.txt").write_text("the user's")
    return folder


def started(work, command):
    places = {"TMPDIR": "tmp", "XDG_CACHE_HOME": "cache"}
    paths = {name: str(work.parent / place) for name, place in places.items()}
    process = subprocess.Popen(
        [sys.executable, "-m", "flatout", *command, "train.py"],
        cwd=work,
        env={**os.environ, **paths},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=heeding,
    )
    ready = work.parent / "tmp/ready"
    await_(lambda: (ready.exists() and ready.read_text()) or process.poll() is not None, 120.0)
    assert process.poll() is None, process.stderr.read()
    return process, int(ready.read_text())


def files(work):
    return {path.name: path.read_text() for path in work.iterdir() if path.name != "train.py"}


@pytest.mark.parametrize(("name", "sent"), CASES)
def test_a_signal_ends_the_trial_and_leaves_the_files_as_before(work, name, sent):
    process, script = started(work, COMMANDS[name])
    numbers, code = SENT[sent]

    for number in numbers:
        process.send_signal(number)
    said = process.communicate(timeout=120)[1]

    assert process.returncode == code
    if sent in AT_ONCE:
        await_(lambda: not psutil.pid_exists(script))
        await_(lambda: (work / "kept.txt").exists())
        await_(lambda: files(work)["model.pt"] == "the user's")
    else:
        assert "Traceback" not in said
        assert list((work.parent / "cache/flatout").glob("trial-*")) == []
    assert files(work) == {"model.pt": "the user's", "kept.txt": "the user's"}
    assert not psutil.pid_exists(script)


def test_a_signal_to_every_process_at_once_leaves_the_files_as_before(work):
    process, script = started(work, COMMANDS["measure"])
    below = psutil.Process(process.pid).children(recursive=True)

    for number in (signal.SIGHUP, signal.SIGTERM):
        for each in (*below, process):
            if each.pid != script or number == signal.SIGTERM:
                os.kill(each.pid, number)
    process.communicate(timeout=120)

    assert files(work) == {"model.pt": "the user's", "kept.txt": "the user's"}
