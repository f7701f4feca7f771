"""Processes that end with the one that started them, and processes that must not."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from flatout.agent import processes
from flatout.agent.processes import (
    ORPHANED_EXIT_CODE,
    descendants,
    die_with_parent,
    kill_started_with,
    stat_columns,
)
from flatout.launch.supervisor import _state_of
from flatout.launch.trial_folders import started_ticks

LASTS = """
import sys, time
from flatout.agent.processes import die_with_lasting_parent
die_with_lasting_parent()
print("tied", flush=True)
time.sleep(float(sys.argv[1]))
"""


@pytest.fixture
def below_first(monkeypatch):
    """Let this process be a child of number 1, that is told rather than ended."""

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(os, "getppid", lambda: 1)
    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(processes, "_prctl", lambda *_: True)


@pytest.mark.parametrize("known", [(), (1,)])
def test_a_parent_that_is_the_first_process_of_a_container_is_no_orphans_parent(below_first, known):
    die_with_parent(*known)


def test_a_child_whose_parent_was_gone_before_it_asked_ends(below_first):
    with pytest.raises(SystemExit, match=str(ORPHANED_EXIT_CODE)):
        die_with_parent(4242)


def start(lasts_s):
    command = [sys.executable, "-c", LASTS, str(lasts_s)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child


def test_a_child_of_a_helper_thread_outlives_the_thread():
    children = []
    thread = threading.Thread(target=lambda: children.append(start(0.5)))

    thread.start()
    thread.join()

    with children[0] as child:
        assert child.wait() == 0


NAMED = """
import ctypes, time
ctypes.CDLL(None).prctl(15, "a학습프로그램".encode())  # PR_SET_NAME: its first 15 bytes
print("named", flush=True)
time.sleep(300)
"""


@pytest.fixture
def cut_name():
    """A process whose name ends in the middle of a character."""
    with subprocess.Popen([sys.executable, "-c", NAMED], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        yield child.pid
        child.kill()


def test_a_process_whose_name_is_cut_inside_a_character_is_seen_as_any_other(cut_name):
    assert cut_name in descendants(os.getpid())
    assert started_ticks(cut_name) is not None
    assert _state_of(cut_name).startswith(f"{cut_name} sleeping")


def test_of_a_process_that_is_gone_nothing_is_known():
    with subprocess.Popen([sys.executable, "-c", "pass"]) as child:
        child.wait()

    assert stat_columns(child.pid) == []
    assert started_ticks(child.pid) is None
    assert _state_of(child.pid) == ""


def test_processes_are_ended_by_what_is_in_their_environment(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    armed = {**os.environ, "FLATOUT_SPEC": str(tmp_path)}
    with subprocess.Popen(command, env=armed) as ours, subprocess.Popen(command) as another:
        kill_started_with("FLATOUT_SPEC", str(tmp_path))

        assert ours.wait() == -9
        assert another.poll() is None
        another.kill()


SHARES = """
import sys, time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(name=sys.argv[1], create=True, size=4096)
print("shares", flush=True)
time.sleep(300)
"""
ENDS = """
import os, subprocess, sys
from flatout.agent.processes import adopt_orphans, await_descendants, kill_descendants
adopt_orphans()
command = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
with subprocess.Popen(command, stdout=subprocess.PIPE) as user:
    user.stdout.readline()
    kill_descendants(os.getpid())
    await_descendants(os.getpid())
"""


@pytest.fixture
def shared():
    """A name of shared memory, which is gone after the test in any case."""
    path = Path(f"/dev/shm/flatout-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


def test_shared_memory_of_killed_processes_is_removed(shared):
    subprocess.run([sys.executable, "-c", ENDS, SHARES, shared.name], check=True)

    assert not shared.exists()


def test_shared_memory_of_processes_ended_by_their_environment_is_removed(shared, tmp_path):
    armed = {**os.environ, "FLATOUT_SPEC": str(tmp_path)}
    command = [sys.executable, "-c", SHARES, shared.name]
    with subprocess.Popen(command, env=armed, stdout=subprocess.PIPE) as user:
        user.stdout.readline()

        kill_started_with("FLATOUT_SPEC", str(tmp_path))

    assert not shared.exists()


def test_a_training_that_ends_its_workers_is_not_told_of_their_end():
    ends = (
        "import os, signal, subprocess, sys\n"
        "from flatout.agent.processes import kill_own_descendants\n"
        "signal.signal(signal.SIGCHLD, lambda *_: sys.exit(3))\n"
        "subprocess.Popen(['sleep', '300'])\n"
        "kill_own_descendants()\n"
        "os._exit(0)"
    )

    assert subprocess.run([sys.executable, "-c", ends], check=False).returncode == 0


def test_what_does_not_end_by_itself_is_ended():
    waits = (
        "import os, subprocess\n"
        "from flatout.agent.processes import await_descendants\n"
        "child = subprocess.Popen(['sleep', '300'])\n"
        "await_descendants(os.getpid(), limit_s=0.1)\n"
        "raise SystemExit(-child.wait())"
    )

    assert subprocess.run([sys.executable, "-c", waits], check=False).returncode == 9
