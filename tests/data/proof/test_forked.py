import atexit
import contextlib
import errno
import os
import resource
import signal
import subprocess
import sys
import time

import psutil
import pytest

from flatout.data.proof.forked import ForkedError, in_fork, in_forks


def test_the_result_comes_back_and_nothing_else():
    seen = []

    found = in_fork(lambda: seen.append(1) or {"pid": os.getpid()}, 10)

    assert found["pid"] != os.getpid()
    assert seen == []


def test_a_large_result_comes_back_whole():
    assert in_fork(lambda: list(range(100_000)), 10) == list(range(100_000))


def test_copies_have_places_of_their_own_in_a_file_that_is_open(tmp_path):
    path = tmp_path / "numbers"
    path.write_bytes(bytes(range(100)))
    with path.open("rb", buffering=0) as file:
        file.seek(10)

        found = in_forks([lambda: list(file.read(2))] * 2, 10)

        assert [answer["value"] for answer in found] == [[10, 11]] * 2
        assert file.read(1) == b"\n"  # 10, as before


@pytest.mark.chaos
def test_what_it_raises_is_told():
    def fail():
        raise KeyError("cat")

    with pytest.raises(ForkedError, match="KeyError: 'cat'"):
        in_fork(fail, 10)


@pytest.mark.chaos
def test_a_copy_that_is_killed_or_slow_is_told_and_gone():
    before = psutil.Process().children()

    with pytest.raises(ForkedError, match="was killed"):
        in_fork(lambda: os.kill(os.getpid(), 9), 10)
    with pytest.raises(ForkedError, match="not done within"):
        in_fork(lambda: time.sleep(60), 0.2)

    assert psutil.Process().children() == before


def test_several_work_side_by_side_and_each_has_its_answer():
    def nap(number):
        return lambda: time.sleep(0.1) or number

    answers = in_forks([nap(1), lambda: 1 / 0, nap(3)], 10)

    assert [answer.get("value") for answer in answers] == [1, None, 3]
    assert "ZeroDivisionError" in answers[1]["error"]


def test_no_exit_handler_of_the_script_runs_in_a_copy(tmp_path):
    mark = tmp_path / "ended"
    handler = atexit.register(mark.write_text, "x")

    in_fork(lambda: 1, 10)

    atexit.unregister(handler)
    assert not mark.exists()


def has_ended(pid):
    """Return whether a process that is no child of ours is gone, within half a minute."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for _ in range(300):
            if process.status() == psutil.STATUS_ZOMBIE:
                return True
            time.sleep(0.1)
        return False
    return True


def is_open(number):
    with contextlib.suppress(OSError):
        os.fstat(number)
        return True
    return False


def open_files():
    return [number for number in range(1024) if is_open(number)]


def room_for_two_files():
    pipe = os.pipe()
    for number in pipe:
        os.close(number)
    return max(pipe) + 1


def room_for_one_process():
    os.setuid(54321)  # for root there is no limit, and of this user there is no one else
    return 2


def in_short_supply(which, find_room):
    """Return what is left of copies of which the system gave one, and no second one.

    Called in a copy, whose limits end with it.
    """
    room, before, trouble = find_room(), open_files(), 0
    limits = resource.getrlimit(which)
    resource.setrlimit(which, (room, limits[1]))
    try:
        in_forks([lambda: time.sleep(60), lambda: 2], 2)
    except OSError as error:
        trouble = error.errno
    resource.setrlimit(which, limits)
    try:
        left = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        left = None
    return [errno.errorcode.get(trouble), left, open_files() == before]


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("which", "find_room", "trouble"),
    [
        (resource.RLIMIT_NOFILE, room_for_two_files, "EMFILE"),
        pytest.param(
            *(resource.RLIMIT_NPROC, room_for_one_process, "EAGAIN"),
            marks=pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user"),
        ),
    ],
)
def test_where_a_second_copy_cannot_be_made_nothing_is_left_of_the_first(which, find_room, trouble):
    found = in_fork(lambda: in_short_supply(which, find_room), 30)

    assert found == [trouble, None, True]


def test_a_script_that_ignores_its_childrens_ends_gets_its_answer():
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        found = in_forks([lambda: 1, lambda: 2], 10)
    finally:
        signal.signal(signal.SIGCHLD, before)

    assert found == [{"value": 1}, {"value": 2}]


@pytest.mark.chaos
@pytest.mark.parametrize("is_done", [True, False])
def test_what_a_copy_started_ends_with_it(is_done, tmp_path):
    note = tmp_path / "pid"

    def begin():
        note.write_text(str(subprocess.Popen(["sleep", "600"]).pid))
        time.sleep(0 if is_done else 60)

    in_forks([begin], 5)

    assert has_ended(int(note.read_text()))


DYING = """
import os, sys, time
from flatout.data.proof.forked import in_fork

def work():
    print(os.getpid(), flush=True)
    time.sleep(600)

in_fork(work, 600)
"""


@pytest.mark.chaos
def test_a_copy_dies_with_the_script():
    script = subprocess.Popen([sys.executable, "-c", DYING], stdout=subprocess.PIPE, text=True)
    with script:
        copy = int(script.stdout.readline())
        script.kill()

    assert has_ended(copy)
