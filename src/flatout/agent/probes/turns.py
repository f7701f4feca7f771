"""Take turns with the process of a pair's other recipe, so that both see the same machine.

What a machine can do drifts by 10 to 30 % within seconds where it is shared. Two trials one after
the other see different machines; two that take turns of a fraction of a second see the same one.
The token goes through a socket: who has received a byte trains, and sends one at the end of a step.
The byte says whether its sender wants more turns: those of loader workers, whose batches come in
bursts, differ by 20 % where those of one process differ by 5 %, and a pair's start-ups cost more
than its turns.
Loader workers are stopped meanwhile: they would make batches ahead in the other side's time. Once
the other process is gone, or where it never came, this one goes on alone.
"""

import contextlib
import math
import os
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import thread as executors
from typing import Any

from flatout.agent.processes import descendants
from flatout.agent.session import Session
from flatout.records.trial_result import Segment

TURN_S = 0.2
"""Time of a turn at least; it ends with a step."""
FEWEST_TURNS, MOST_TURNS = 10, 20
"""Turns that make a trial, the second where they differ: the first `WARM_TURNS` are left out."""
WARM_TURNS = 2
SURE = 0.03
"""Standard error of the middle turn, in logs, from which no more are wanted: two equal processes
differ by as much whatever their turns say."""
MEDIAN = math.pi / 2
"""The variance of a median of normal numbers against that of their mean."""
MORE, ENOUGH = b"+", b"."
RESTING = {
    *("TMonitor", "_RefreshThread", "_TrackThread"),
    *("QueueFeederThread", "_AsyncWriterThread", "_EventLoggerThread"),
}
"""Kinds or names of threads that make no batches: those of tqdm and rich, which draw bars, and of
multiprocessing and TensorBoard, which send what they are given."""
COLD = 3
"""Steps from which the first one of a turn is left out of its time: its data are in no cache. Not
with workers, whose batches come in bursts."""


def start(session: Session, options: Mapping[str, Any]) -> "Turns":
    """Wait for the first turn, and end each turn after `TURN_S`.

    `options["descriptor"]` is this side's end of the socket; with `options["is_first"]` the first
    turn is this one's. `options["root"]` is the process that started both sides.
    """
    turns = Turns(session, int(options["descriptor"]), is_first=bool(options["is_first"]))
    session.on("lap", turns.saw_segment)
    return turns


class Turns:
    """The turns so far, and what this process did while the other one had its own."""

    def __init__(self, session: Session, descriptor: int, *, is_first: bool) -> None:
        os.set_inheritable(descriptor, False)  # noqa: FBT003  C takes no names
        self.session = session
        self.socket = socket.socket(fileno=descriptor)
        self.is_alone = False
        self.walls_s: list[float] = []
        self.turns_s: list[float] = []
        self.waited_s = self.busy_s = 0.0
        self.threads: set[str] = set()
        self.workers: list[int] = []
        session.wants_more = True
        if not is_first:
            self._wait()
            session.clock.lap()
        self.waited_s = self.busy_s = 0.0  # to import torch is no turn
        self.began = session.clock.now()

    def saw_segment(self, segment: Segment) -> None:
        """Hand over at the end of a step; what takes time here belongs to none."""
        self.walls_s.append(sum(segment.seconds))
        if self.is_alone or self.session.clock.now() - self.began < TURN_S:
            return
        leaves_out = len(self.walls_s) >= COLD and not self.workers
        walls_s = self.walls_s[1:] if leaves_out else self.walls_s
        self.turns_s.append(sum(walls_s) / len(walls_s))
        self.walls_s = []
        self.session.wants_more = wants_more(self.turns_s)
        self._wait(MORE if self.session.wants_more else ENOUGH)
        self.session.clock.lap()
        self.began = self.session.clock.now()

    def result(self) -> Mapping[str, Any]:
        """Return the mean step of each turn, and what went on here while this side waited.

        That is the share of the time in which the process was busy, and threads of Python's that
        may make batches ahead: these need not be busy to be of use.
        """
        share = self.busy_s / self.waited_s if self.waited_s else 0.0
        return {"turns_s": self.turns_s, "busy_share": share, "threads": sorted(self.threads)}

    def _wait(self, told: bytes = b"") -> None:
        """Hand over by telling the other side a byte, if any, and wait for its own."""
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not _rests(thread):
                self.threads.add(f"{thread.name} {type(thread).__name__}")
        self.workers = descendants(os.getpid())
        _signal(self.workers, signal.SIGSTOP)
        began, busy_s = time.monotonic(), time.process_time()
        try:
            self.socket.sendall(told)
            token = self.socket.recv(1)
        except OSError:
            token = b""
        finally:
            _signal(self.workers, signal.SIGCONT)
        self.waited_s += time.monotonic() - began
        self.busy_s += time.process_time() - busy_s
        if not token:
            self._go_on_alone()
        self.session.wants_more |= token == MORE

    def _go_on_alone(self) -> None:
        self.is_alone, self.session.wants_more = True, False


def wants_more(turns_s: Sequence[float]) -> bool:
    """Return whether the turns so far are too few, or differ by too much to say what one takes."""
    if not FEWEST_TURNS <= len(turns_s) < MOST_TURNS:
        return len(turns_s) < FEWEST_TURNS
    logs = [math.log(turn_s) for turn_s in turns_s[WARM_TURNS:]]
    return math.sqrt(MEDIAN * statistics.variance(logs) / len(logs)) > SURE


def _rests(thread: threading.Thread) -> bool:
    """Return whether a thread makes no batches: by its name, or because nothing was given to it.

    Executors keep their threads; what is in none of a function's lines but the executor's own waits
    for work. torch.compile leaves such threads behind.
    """
    if {type(thread).__name__, thread.name} & RESTING:
        return True
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code is executors._worker.__code__


def _signal(processes: Sequence[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)
