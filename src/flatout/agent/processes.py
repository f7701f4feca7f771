"""Processes below this one: find them, end them, and make them end with us. Linux, stdlib only."""

import contextlib
import ctypes
import fcntl
import os
import signal
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
ORPHANED_EXIT_CODE = 113
"""Exit code of a child whose parent was gone before it could ask to be told."""
CLEAN_UP_S = 5.0
"""How long it may take to remove the memory of those that are gone: a tracker of Python's needs
milliseconds, torch's manager waits 2 s for others that may come."""

OPEN_FILES = "/proc/self/fd"
"""Where Linux lists a process's open files, and opens each of them once more."""
EXEC_S = 0.02
"""How long a process may take from its start to its program, in which it cannot be told apart."""


def die_with_parent(parent: int | None = None) -> None:
    """Ask the kernel to kill this process when the thread that started it ends.

    The request is not inherited by fork, so every forked child must ask again. With the number of
    the process that started it, a child also ends if that was gone before; 1 proves nothing, in a
    container flatout itself is that.
    """
    expected = os.getppid() if parent is None else parent
    if not _prctl(PR_SET_PDEATHSIG, signal.SIGKILL):
        return
    if os.getppid() != expected:
        os._exit(ORPHANED_EXIT_CODE)


def die_with_lasting_parent() -> None:
    """Do the same if the parent's main thread started this process, and nothing otherwise.

    The kernel tells of the end of a thread: what a helper thread started would end with that.
    """
    parent = os.getppid()
    with contextlib.suppress(OSError):  # a kernel that does not list them: the supervisor remains
        listed = Path(f"/proc/{parent}/task/{parent}/children").read_text()
        if str(os.getpid()) in listed.split():
            die_with_parent(parent)


def reopen_files() -> None:
    """Give this process, a forked copy, places of its own in the files that are open for reading.

    Copies share the place in a file: a data set that reads an open one would move it for the
    script, and find it moved by other copies. Files that can be written stay shared: output goes on
    where it ended. Without /proc nothing is done.
    """
    with contextlib.suppress(OSError):
        for path in Path(OPEN_FILES).iterdir():
            with contextlib.suppress(OSError):  # closed since, or not to be opened once more
                _reopen(int(path.name))


def _reopen(descriptor: int) -> None:
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    is_read = flags & os.O_ACCMODE == os.O_RDONLY
    if not is_read or not stat.S_ISREG(os.fstat(descriptor).st_mode):
        return
    place = os.lseek(descriptor, 0, os.SEEK_CUR)
    own = os.open(f"{OPEN_FILES}/{descriptor}", flags | os.O_CLOEXEC)
    try:
        os.lseek(own, place, os.SEEK_SET)
        os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
    finally:
        os.close(own)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends, so that none escapes."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def descendants(pid: int) -> list[int]:
    """Return the live processes below `pid`, zombies left out, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        columns = stat_columns(int(entry.name))
        if columns and columns[0] != "Z":
            children.setdefault(int(columns[1]), []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def stat_columns(pid: int) -> list[str]:
    """Return what the kernel says of a process, from its state on; nothing of one that is gone.

    The name before that is any 15 bytes: the kernel cuts it, also in the middle of a character.
    """
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
    return []


def cleans_up(argv: Sequence[str]) -> bool:
    """Return whether this command line is of what removes shared memory after its users' end.

    Multiprocessing's tracker, joblib's, and torch's manager: if they are killed with the others,
    the memory stays taken for as long as the machine runs. The script's own words never count.

    >>> cleans_up(["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"])
    True
    >>> cleans_up(["python", "train.py", "-c", "resource_tracker"])
    False
    """
    if any(Path(program).name == "torch_shm_manager" for program in argv[:1]):
        return True
    if "-c" not in argv[1:-1]:
        return False
    return "resource_tracker import main" in argv[argv.index("-c") + 1]


def without_cleaners(pids: Iterable[int]) -> list[int]:
    """Return the processes without those that clean up after the others."""
    lines = {pid: _command_line(pid) for pid in pids}
    if not all(lines.values()):
        # Between its start and its program a process has none; nor has one that is ending.
        time.sleep(EXEC_S)
        lines = {pid: _command_line(pid) for pid in lines}
    return [pid for pid, line in lines.items() if not cleans_up(line)]


def kill_descendants(pid: int) -> int:
    """Kill what is below `pid`, but what cleans up after it; return how many processes that were.

    Repeats until nothing is left: a process may fork between the listing and the signal.
    """
    killed = 0
    for _ in range(20):
        below = without_cleaners(descendants(pid))
        if not below:
            break
        for child in below:
            with contextlib.suppress(OSError):
                os.kill(child, signal.SIGKILL)
                killed += 1
        reap()
    return killed


def kill_own_descendants() -> None:
    """Kill what is below this process, which is about to end, without being told of it.

    torch's handler raises for a worker that was killed, also in what runs before the exit.
    """
    with contextlib.suppress(ValueError):  # only the main thread may, and only there handlers run
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kill_descendants(os.getpid())


def await_descendants(pid: int, limit_s: float = CLEAN_UP_S) -> None:
    """Let what is left below `pid` end on its own, and kill what does not in time."""
    _await(lambda: descendants(pid), limit_s)


def kill_started_with(variable: str, value: str) -> None:
    """Kill the processes that began with this in their environment, and those they forked.

    Repeats until nothing is left, so that none of them writes any more. What cleans up after them
    has the time for that.
    """
    entry = f"{variable}={value}".encode()

    def started() -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):  # another user's, or gone
                if entry in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    for _ in range(100):
        below = without_cleaners(started())
        if not below:
            break
        for pid in below:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)  # a killed process takes a moment to go
    _await(started, CLEAN_UP_S)


def reap() -> None:
    """Collect ended children so that no zombie is left."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _await(find: Callable[[], list[int]], limit_s: float) -> None:
    """Wait until nothing is found any more, and kill what is found after the time."""
    ends_at = time.monotonic() + limit_s
    while (found := find()) and time.monotonic() < ends_at:
        time.sleep(0.01)
    for pid in found:
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _command_line(pid: int) -> list[str]:
    """Return the words that a process was started with; none of one that is gone."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return [os.fsdecode(word) for word in words if word]
    return []


def _prctl(option: int, value: int) -> bool:
    """Call prctl; False where there is none (not Linux): the caller goes on without it."""
    try:
        return bool(ctypes.CDLL(None).prctl(option, value, 0, 0, 0) == 0)
    except (AttributeError, OSError):
        return False
