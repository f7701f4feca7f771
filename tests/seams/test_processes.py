"""Processes that end with the one that started them, and processes that must not."""

import os
import subprocess
import sys
import threading

import pytest

from flatout.seams import processes
from flatout.seams.processes import ORPHANED_EXIT_CODE, die_with_parent, kill_started_with

LASTS = """
import sys, time
from flatout.seams.processes import die_with_lasting_parent
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


def test_processes_are_ended_by_what_is_in_their_environment(tmp_path):
    command = [sys.executable, "-c", "import time; time.sleep(300)"]
    armed = {**os.environ, "FLATOUT_SPEC": str(tmp_path)}
    with subprocess.Popen(command, env=armed) as ours, subprocess.Popen(command) as another:
        kill_started_with("FLATOUT_SPEC", str(tmp_path))

        assert ours.wait() == -9
        assert another.poll() is None
        another.kill()
