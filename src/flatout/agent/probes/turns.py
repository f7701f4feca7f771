"""Take turns with the process of a pair's other recipe, so that both see the same machine.

What a machine can do drifts by 10 to 30 % within seconds where it is shared. Two trials one after
the other see different machines; two that take turns of a fraction of a second see the same one.
The token goes through a socket: who has received a byte trains, and sends one at the end of a step.
Once the other process is gone, or where it never came, this one goes on alone.
"""

import os
import socket
import threading
import time
from collections.abc import Mapping
from typing import Any

from flatout.agent.session import Session
from flatout.records.trial_result import Segment

TURN_S = 0.2
"""Time of a turn at least; it ends with a step."""
FEWEST_TURNS = 10
"""Turns that make a trial: the first ones are warm-up."""
RESTING = ("TMonitor",)
"""Kinds of threads that sleep nearly all the time: tqdm's looks at its bars every ten seconds."""
COLD = 3
"""Steps from which the first one of a turn is left out of its time: its data are in no cache."""


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
        self.helpers = 0
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
        walls_s = self.walls_s[1:] if len(self.walls_s) >= COLD else self.walls_s
        self.turns_s.append(sum(walls_s) / len(walls_s))
        self.walls_s = []
        self.session.wants_more = len(self.turns_s) < FEWEST_TURNS
        try:
            self.socket.sendall(b".")
        except OSError:
            self._go_on_alone()
        else:
            self._wait()
        self.session.clock.lap()
        self.began = self.session.clock.now()

    def result(self) -> Mapping[str, Any]:
        """Return the mean step of each turn, and what went on here while this side waited.

        That is the share of the time in which the process was busy, and workers or threads of
        Python's that make batches ahead: these need not be busy to be of use.
        """
        share = self.busy_s / self.waited_s if self.waited_s else 0.0
        return {"turns_s": self.turns_s, "busy_share": share, "helpers": self.helpers}

    def _wait(self) -> None:
        self.helpers = max(self.helpers, self._num_helpers())
        began, busy_s = time.monotonic(), time.process_time()
        try:
            token = self.socket.recv(1)
        except OSError:
            token = b""
        self.waited_s += time.monotonic() - began
        self.busy_s += time.process_time() - busy_s
        if not token:
            self._go_on_alone()

    def _num_helpers(self) -> int:
        workers = [
            seen.asked.get("effective_workers") or 0 for seen in self.session.loaders.values()
        ]
        threads = [one for one in threading.enumerate() if type(one).__name__ not in RESTING]
        return sum(workers) + len(threads) - 1

    def _go_on_alone(self) -> None:
        self.is_alone, self.session.wants_more = True, False
