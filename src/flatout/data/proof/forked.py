"""Run a function in forked copies of this process and take its plain result.

What the function does there leaves no trace here: random streams, caches and counters of the
user's objects stay where they were, and so do the places in files that are open for reading. The
copies are killed when they are done, so that no exit handler of the script runs in them, and what
they started goes with them: each has a process group of its own.
"""

import contextlib
import json
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from flatout.agent.processes import die_with_parent, reopen_files


class ForkedError(Exception):
    """The copy ended, or was ended, without a result; the text says how."""


def in_fork(work: Callable[[], Any], limit_s: float) -> Any:
    """Return the result of `work`, a plain JSON value, from a forked copy of this process."""
    with begun_in_fork(work, limit_s) as result:
        return result()


@contextlib.contextmanager
def begun_in_fork(work: Callable[[], Any], limit_s: float) -> Iterator[Callable[[], Any]]:
    """Begin `work` in a forked copy, and give what waits for its result; at the end it is ended."""
    ends_at = time.monotonic() + limit_s
    pid, pipe = _start(work)

    def result() -> Any:
        found = _read(pipe, ends_at)
        if found is None:
            raise ForkedError(f"not done within {limit_s:.0f} s")
        if "error" in found:
            raise ForkedError(found["error"])
        return found["value"]

    try:
        yield result
    finally:
        os.close(pipe)
        _end(pid)


def in_forks(works: list[Callable[[], Any]], limit_s: float) -> list[dict[str, Any] | None]:
    """Return of each work its `value` or its `error`; None where it was not done in time.

    Raises:
        OSError: if the system gives no further process or file; the copies so far are gone then.
    """
    ends_at = time.monotonic() + limit_s
    started: list[tuple[int, int]] = []
    try:
        for work in works:
            started.append(_start(work))  # noqa: PERF401  those begun end where one cannot begin
        return [_read(pipe, ends_at) for _, pipe in started]
    finally:
        for pid, pipe in started:
            os.close(pipe)
            _end(pid)


def _start(work: Callable[[], Any]) -> tuple[int, int]:
    ours, theirs = os.pipe()
    try:
        pid = _fork()
    except OSError:
        os.close(ours)
        os.close(theirs)
        raise
    if pid:
        os.close(theirs)
        _lead_group(pid)  # here and there: whoever comes first, the group is there from now on
        return pid, ours
    _work_and_die(work, theirs)
    raise AssertionError("a killed process goes on")


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads in the parent: workers of a loader are forked the same way.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _lead_group(pid: int) -> None:
    """Give a copy a process group of its own; 0 for this process."""
    with contextlib.suppress(OSError):  # it is gone already
        os.setpgid(pid, pid)


def _end(pid: int) -> None:
    """End a copy and what it started: a pool, or a program."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):  # the script ignores SIGCHLD, or waits for all
        os.waitpid(pid, 0)


def _work_and_die(work: Callable[[], Any], pipe: int) -> None:
    try:
        die_with_parent()
        reopen_files()
        _leave_group()
        _use_one_thread()
        answer: dict[str, Any] = {"value": work()}
    except BaseException as error:  # noqa: BLE001  the user's code runs here: all of it is an answer
        answer = {"error": f"{type(error).__name__}: {error}"[:500]}
    try:
        os.write(pipe, json.dumps(answer).encode() + b"\n")
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def _leave_group() -> None:
    _lead_group(0)
    # A terminal stops the groups behind the foremost one when they read from it or write to it.
    for signum in (signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(signum, signal.SIG_IGN)


def _use_one_thread() -> None:
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def _read(pipe: int, ends_at: float) -> dict[str, Any] | None:
    raw = b""
    while not raw.endswith(b"\n"):
        left_s = ends_at - time.monotonic()
        if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
            return None
        part = os.read(pipe, 1 << 16)
        if not part:
            return {"error": "the process was killed"}
        raw += part
    answer: dict[str, Any] = json.loads(raw)
    return answer
