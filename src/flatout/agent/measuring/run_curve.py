"""What a real training leaves for `flatout run --record`: rows in files of the job's folder.

Rows are appended as they come, so that a training that is killed leaves those it had.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flatout.agent import patching
from flatout.agent.session import Session
from flatout.records.trial_result import CURVE, HIGHER_IS_BETTER, LOWER_IS_BETTER, PRINTED

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

    def __init__(self, session: Session, folder: Path, rank: Callable[[], int]) -> None:
        self.session, self.folder, self.rank = session, folder, rank
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
        path = self.folder / f"{name}-{self.rank()}-{os.getpid()}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
