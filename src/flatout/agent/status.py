"""What a training process tells about itself: a small file, written again at most twice a second.

It is in the job's folder and is replaced as a whole, so that reading it disturbs no one. `RunCurve`
leaves what `flatout run --record` keeps: rows that are appended as they come, so that a training
that is killed leaves those it had.
"""

import atexit
import contextlib
import json
import os
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flatout.agent import patching
from flatout.agent.ranks import own_rank
from flatout.agent.session import Session
from flatout.agent.training_device import find_cuda_device
from flatout.records.phase_clock import NAMES
from flatout.records.trial_result import CURVE, HIGHER_IS_BETTER, LOWER_IS_BETTER, PRINTED, Segment

EVERY_S = 0.5
"""No one reads faster."""
COST = 1000
"""The pause after a record is this many times as long as writing it took: on a slow disk too, it
costs at most 0.1 % of the time."""
RECENT_S = 5.0
"""Time over which rates are taken: long enough to be steady, short enough to show a change."""


class Publisher:
    """Writes the record of one training process while it trains."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session = session
        self.folder = folder
        self.curve = RunCurve(session, folder) if session.spec.records_run else None
        self._begin()

    def _begin(self) -> None:
        self.pid = os.getpid()
        self.is_ended = False
        self.rows: list[Segment] = []
        """The steps since the last record."""
        self.samples = 0
        self.turn: dict[int, int] = {}
        """Samples of the latest steps by optimizer, none of which made two."""
        self.totals = [0.0] * len(NAMES)
        self.next_at = 0.0
        self.recent: deque[tuple[float, int, int, tuple[float, ...]]] = deque()
        """Moment, steps, samples and phases of the last records."""
        self.loss = _Loss()
        self._ask_for_loss()

    def install(self) -> None:
        """Follow the session."""
        self.session.on("segments", self.saw_segments)
        os.register_at_fork(after_in_child=self._begin)  # it may train too, as one of its own
        atexit.register(self.withdraw)

    def saw_segments(self, segments: Sequence[Segment]) -> None:
        """Add steps; write when it is time."""
        if self.is_ended:
            return
        self.rows += segments  # added up when a record is written
        moment = self.session.clock.since
        if moment >= self.next_at:
            self.publish(moment)

    def saw_backward(self, tensors: Any) -> None:
        """Look at the loss, once for each record."""
        self.session.off("backward", self.saw_backward)
        self.loss.see(self._loss_of(tensors), self.steps)

    @property
    def steps(self) -> int:
        """Training steps so far."""
        return self.session.made_steps

    def publish(self, moment: float) -> None:
        """Write the record; never more often than its cost allows."""
        now = self.session.clock.now
        began = now()
        self._add_up()
        self.recent.append((moment, self.steps, self.samples, tuple(self.totals)))
        while len(self.recent) > 2 and moment - self.recent[1][0] > RECENT_S:
            self.recent.popleft()
        part = self.folder / f"status-{self.pid}.part"
        try:
            part.write_text(json.dumps(self._record(moment)), encoding="utf-8")
            part.replace(part.with_suffix(".json"))
        except OSError:
            self.is_ended = True  # the folder is gone: no one watches any more
            return
        if self.curve is not None:
            self.session.quietly(self.curve.saw)(
                moment, self.steps, self.samples, self.loss.read()[0]
            )
        self._ask_for_loss()
        self.next_at = moment + max(EVERY_S, COST * (now() - began))

    def withdraw(self) -> None:
        """Remove the record: this process trains no more."""
        if os.getpid() == self.pid:
            if self.curve is not None and self.steps:
                self._add_up()
                moment = self.session.clock.since
                self.session.quietly(self.curve.ended)(
                    moment, self.steps, self.samples, self.loss.read()[0]
                )
            with contextlib.suppress(OSError):
                (self.folder / f"status-{self.pid}.json").unlink()

    def _loss_of(self, tensors: Any) -> Any:
        """Return the loss as the script computed it, before a gradient scaler's factor."""
        loss = tensors[0] if isinstance(tensors, tuple | list) and len(tensors) == 1 else tensors
        is_several = isinstance(loss, tuple | list)
        return None if is_several else self.session.unscaled.get(loss, loss)

    def _ask_for_loss(self) -> None:
        """Listen to the next backward, and to that one only."""
        self.session.off("backward", self.saw_backward)
        self.session.on("backward", self.saw_backward)

    def _add_up(self) -> None:
        rows, self.rows = self.rows, []
        is_fed = any(seen.is_training for seen in self.session.loaders.values())
        for segment in rows:
            called = 0 if is_fed else segment.called_with
            self.samples += segment.samples or self._new_in_turn(segment.who, called)
            for phase, value in enumerate(segment.seconds if segment.is_sampled else ()):
                self.totals[phase] += value

    def _new_in_turn(self, who: int, called: int) -> int:
        """Return how many samples no other optimizer of the turn had: `analysis.steps.step_of`."""
        if who not in self.session.places:  # one of a later task or fold took its place
            return called
        if who in self.turn:
            self.turn.clear()
        others = max(self.turn.values(), default=0)
        self.turn[who] = called
        return max(0, called - others)

    def _record(self, moment: float) -> dict[str, Any]:
        first, last = self.recent[0], self.recent[-1]
        if len(self.recent) == 1:  # the first step of all: from nothing
            first = (moment - sum(last[3]), 0, 0, (0.0,) * len(NAMES))
        seconds = [b - a for a, b in zip(first[3], last[3], strict=True)]
        value, step = self.loss.read()
        return {
            "pid": self.pid,
            "rank": own_rank(),
            "at_s": moment,
            "step": last[1],
            "over_s": max(last[0] - first[0], 1e-9),
            "over_steps": max(0, last[1] - first[1]),  # less where another optimizer joins in
            "over_samples": last[2] - first[2],
            "seconds": dict(zip(NAMES, seconds, strict=True)),
            "loss": value,
            "loss_step": step,
            "device": device_now(self.session),
        }


class _Loss:
    """The latest loss that can be had without making the host wait for the device."""

    def __init__(self) -> None:
        self.known: tuple[float | None, int | None] = (None, None)
        self.waiting: tuple[Any, Any, int] | None = None

    def see(self, loss: Any, step: int) -> None:
        """Note a loss; from a CUDA device it is copied and read when it has arrived."""
        import torch

        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            return
        if loss.device.type == "cpu":
            self.known = (float(loss.detach()), step)
        elif loss.device.type == "cuda" and self.waiting is None:
            if torch.cuda.is_current_stream_capturing():
                return  # a copy would become a part of the graph
            place = torch.empty((), dtype=loss.dtype, device="cpu", pin_memory=True)
            place.copy_(loss.detach().reshape(()), non_blocking=True)
            arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            # Where the copy was queued: the script's own device may be another than the current.
            arrived.record(torch.cuda.current_stream(loss.device))
            self.waiting = (place, arrived, step)

    def read(self) -> tuple[float | None, int | None]:
        """Return the latest loss that is here, and its step."""
        if self.waiting is not None and self._has_arrived(self.waiting[1]):
            place, _, step = self.waiting
            self.known, self.waiting = (float(place), step), None
        return self.known

    def _has_arrived(self, arrived: Any) -> bool:
        """Ask the device, unless the script captures a graph: the question would end that."""
        import torch

        return not torch.cuda.is_current_stream_capturing() and bool(arrived.query())


def device_now(session: Session) -> dict[str, Any]:
    """Return the device of the training and what tensors hold there; asks nothing of it."""
    import torch

    device = find_cuda_device(session)
    if device is None:
        return {"kind": "cpu"}
    return {
        "kind": "cuda",
        "uuid": str(getattr(torch.cuda.get_device_properties(device), "uuid", "")),
        "allocated_bytes": torch.cuda.memory_allocated(device),
    }


MAX_LINE = 4096
"""Characters of a line that are looked at: progress bars rewrite theirs without end."""
MAX_PRINTED = 100_000
"""Rows of printed metrics that one process leaves."""
ROWS_A_SCALE = 1000
"""Points of the curve in the time that the training has taken so far: later ones come apart as the
training grows, so that a day leaves some thousands."""
METRIC = re.compile(
    r"(?<![A-Za-z0-9])"
    r"(?P<name>(?:(?:train|training|val|valid|validation|test|eval|dev)[ _/.-]+)?"
    rf"(?:[a-z0-9]+[_/])*(?:{'|'.join((*LOWER_IS_BETTER, *HIGHER_IS_BETTER))})"
    r"(?:[_@]?(?:\d+|epoch|step|macro|micro|weighted|mean|avg|top\d+))*)"
    r"['\"]?\s*[:=]?\s*\(?"
    r"(?P<value>[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)(?![\w./])",
    re.IGNORECASE,
)
"""`val loss 0.51`, `accuracy: 91.2%`, `{'eval_loss': 0.5}`, `acc@1=0.7`."""


class RunCurve:
    """Leaves the points and the printed metrics of one training process."""

    def __init__(self, session: Session, folder: Path) -> None:
        self.session, self.folder = session, folder
        self.began_s: float | None = None
        self.next_s = 0.0
        self.lines: dict[str, str] = {"stdout": "", "stderr": ""}
        """The line that is being written, by stream: `print` writes it piece by piece."""
        self.printed = 0
        for name in self.lines:
            self._listen(name)

    def saw(self, moment: float, step: int, samples: int, loss: float | None) -> None:
        """Leave a point, unless the last one was a moment ago."""
        if self.began_s is None:
            self.began_s = moment
        spent_s = moment - self.began_s
        if spent_s >= self.next_s:
            self.next_s = spent_s + spent_s / ROWS_A_SCALE
            self._leave(CURVE, {"step": step, "s": spent_s, "samples": samples, "loss": loss})

    def ended(self, moment: float, step: int, samples: int, loss: float | None) -> None:
        """Leave the last point, however soon it comes after the one before."""
        self.next_s = 0.0
        self.saw(moment, step, samples, loss)

    def wrote(self, stream: str, text: str) -> None:
        """Look at what the script writes, line by line."""
        *whole, rest = re.split(r"[\r\n]", self.lines[stream] + text)
        self.lines[stream] = rest[-MAX_LINE:]
        for line in whole:
            for found in METRIC.finditer(line[:MAX_LINE]):
                self._leave_printed(found["name"], float(found["value"]))

    def _leave_printed(self, name: str, value: float) -> None:
        self.printed += 1
        if self.printed > MAX_PRINTED or self.began_s is None:
            return  # before the first step nothing was learned
        session = self.session
        row = {
            "name": re.sub(r"[ .-]+", "_", name.lower()),
            "step": session.made_steps,
            "s": session.clock.now() - self.began_s,
            "value": value,
        }
        self._leave(PRINTED, row)

    def _listen(self, name: str) -> None:
        stream = getattr(sys, name)
        if stream is None:  # pythonw and daemons have none
            return

        def listening(write: Callable[..., Any]) -> Callable[..., Any]:
            def written(text: str) -> Any:
                done = write(text)
                if self.session.is_mine():
                    self.session.quietly(self.wrote)(name, text)
                return done

            return written

        self.session.quietly(patching.wrap)(stream, "write", listening)

    def _leave(self, name: str, row: Mapping[str, Any]) -> None:
        path = self.folder / f"{name}-{own_rank()}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
