"""Worker processes for numbered jobs: results as they come, no orphans, no silent deaths."""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

from flatout.agent.processes import die_with_parent, reopen_files
from flatout.data.format import BadSample
from flatout.records.errors import UserError

Tick = Callable[[int], None]
Job = Callable[[int, Tick], Any]
"""Does a job by its number, and calls the tick with the samples it has got through since."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
JOIN_S = 10.0
ENDING = (signal.SIGINT, signal.SIGTERM)


def perform(
    job: Job, numbers: Sequence[int], *, workers: int, method: str | None = None, tick: Tick
) -> Generator[tuple[int, Any], None, None]:
    """Do all jobs and give each result with its number, in the order in which they end.

    One worker is this process.

    Raises:
        UserError: for whatever ended a job: a bad sample, a full disk, a worker that was killed.
    """
    if workers <= 1 or len(numbers) <= 1:
        for number in numbers:
            yield number, _done_here(job, number, tick)
        return
    crew = _Crew(job, min(workers, len(numbers)), method or start_method())
    try:
        yield from crew.work(list(numbers), tick)
    finally:
        crew.dismiss()


def _done_here(job: Job, number: int, tick: Tick) -> Any:
    try:
        return job(number, tick)
    except Exception as error:
        kind, value = _worded(error)
        if kind == "defect":
            raise
        raise UserError(value) from None


@contextmanager
def failures_worded() -> Iterator[None]:
    """Say of a failed read or write what it is, as for the jobs: full disks are no defects."""
    try:
        yield
    except OSError as error:
        raise UserError(_worded(error)[1]) from None


def start_method() -> str:
    """Return how workers start: forked where that is safe, again where there are threads."""
    has_threads = threading.active_count() > 1 or "torch" in sys.modules
    is_linux = sys.platform.startswith("linux")
    return "fork" if is_linux and not has_threads else "spawn"


class _Crew:
    """Some processes, each with a pipe."""

    def __init__(self, job: Job, workers: int, method: str) -> None:
        context: Any = multiprocessing.get_context(method)
        self.members: dict[Connection, Any] = {}
        self.busy: dict[Connection, int] = {}
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, job, os.getpid()), daemon=True, name="flatout pack"
            )
            # Until a worker has handlers of its own, it has flatout's, which raise wherever it is.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
            process.start()
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
            self.members[ours] = process

    def work(self, numbers: list[int], tick: Tick) -> Iterator[tuple[int, Any]]:
        waiting = numbers[::-1]
        for pipe in self.members:
            self._next(pipe, waiting)
        while self.busy:
            for ready in wait(list(self.busy)):
                kind, value = self._receive(ready)
                if kind == "tick":
                    tick(value)
                elif kind == "done":
                    number = self.busy.pop(ready)  # type: ignore[call-overload]
                    self._next(ready, waiting)
                    yield number, value
                else:
                    _fail(kind, value)

    def _next(self, pipe: Any, waiting: list[int]) -> None:
        if waiting:
            self.busy[pipe] = waiting.pop()
            # A worker that is dead already is found, with its cause, by the next receive.
            with contextlib.suppress(BrokenPipeError):
                pipe.send(self.busy[pipe])

    def _receive(self, pipe: Any) -> tuple[str, Any]:
        try:
            message: tuple[str, Any] = pipe.recv()
        except (EOFError, ConnectionResetError):
            process = self.members[pipe]
            process.join(JOIN_S)
            return "died", process.exitcode
        return message

    def dismiss(self) -> None:
        for process in self.members.values():
            process.terminate()
        for pipe, process in self.members.items():
            process.join(JOIN_S)
            if process.is_alive():
                process.kill()
                process.join()
            pipe.close()


def _fail(kind: str, value: Any) -> None:
    if kind == "died":
        cause = f"signal {-value}" if value and value < 0 else f"exit code {value}"
        raise UserError(
            f"a worker process died ({cause}); memory may be short: run the same command again "
            "with fewer --workers, what is done is kept"
        )
    if kind == "defect":
        raise RuntimeError(f"in a worker process:\n{value}")
    raise UserError(value)


def _worded(error: Exception) -> tuple[str, str]:
    """Return the kind of a failure and what is said about it."""
    if isinstance(error, BadSample):
        return "bad", f"{error}; --on-bad skip leaves such samples out and lists them"
    if isinstance(error, UserError):
        return "user", str(error)
    if isinstance(error, OSError) and error.errno in FULL:
        return "full", (
            f"the disk is full ({error.strerror}); make room and run the same command again: what "
            "is done is kept"
        )
    if isinstance(error, OSError):
        return "os", f"{error}; run the same command again to go on"
    return "defect", "".join(traceback.format_exception(error))


def _serve(pipe: Connection, job: Job, parent: int) -> None:
    """Do jobs until the pipe ends; never outlive the process that gave them."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the parent ends the crew
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING)
    die_with_parent()
    reopen_files()  # a forked worker has the data set that was opened here

    def tick(count: int) -> None:
        if os.getppid() != parent:
            os._exit(1)
        pipe.send(("tick", count))

    while os.getppid() == parent:
        try:
            number = pipe.recv()
        except EOFError:
            return
        try:
            message: tuple[str, Any] = ("done", job(number, tick))
        except Exception as error:  # noqa: BLE001  worded here, raised in the parent
            message = _worded(error)
        try:
            pipe.send(message)
        except BrokenPipeError:
            return
