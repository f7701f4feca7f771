"""A trace of a few steps by torch's profiler, in a pass of its own: it slows every operator.

One step is traced first, and its size decides how many more may be.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.agent.measuring import kernels
from flatout.agent.session import Session
from flatout.analysis.steps import running_anchor
from flatout.records.trial_result import Segment

ACTIVE_STEPS = 5
"""Enough to tell a rare step from the usual one, and a file that viewers still open quickly."""
MAX_BYTES = 128 * 1024**2
"""Of the trace before compression. Chrome's viewer loads it as one string, which V8 limits to
2**29 characters; a quarter of that leaves room for what it builds from it."""


def start(session: Session, options: Mapping[str, Any]) -> "TraceProbe":
    """Trace after `skip` steps, at most `steps` of them within `max_bytes`."""
    return TraceProbe(session, options)


class TraceProbe:
    """Starts and stops the profiler at the edges of steps."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self.session = session
        self.skip = int(options.get("skip", 0))
        self.steps_wanted = int(options.get("steps", ACTIVE_STEPS))
        self.max_bytes = int(options.get("max_bytes", MAX_BYTES))
        self.folder = Path(session.spec.folder)
        self.profiler: Any = None
        self.steps = 0
        self.step_bytes = 0
        self.file = ""
        self.active = 0
        self.why = "the script ended before a step could be traced"
        kernels.watch()
        session.on("segment", self.saw_segment)

    def saw_segment(self, segment: Segment) -> None:
        """Go on at the end of a step."""
        if segment.who != running_anchor([each.who for each in self.session.segments]):
            return
        self.steps += 1
        if self.profiler is not None:
            with kernels.ours():
                self.profiler.step()
        elif self.steps >= self.skip and not self.step_bytes:
            self.begin(1, self.weigh)
        if self.step_bytes and self.profiler is None and not self.active:
            self.begin_whole()

    def begin(self, active: int, ready: Any) -> None:
        """Start the profiler: one step to warm it up, then the traced ones."""
        from torch.profiler import profile, schedule, supported_activities

        profiler: Any = profile(
            activities=sorted(supported_activities(), key=str),  # type: ignore[no-untyped-call]
            schedule=schedule(wait=0, warmup=1, active=active, repeat=1),
            on_trace_ready=ready,
            acc_events=True,  # one cycle: without, torch warns in the script's output
        )
        if kernels.begin(profiler, self.give_way):
            self.profiler = profiler
        else:
            self.bar()

    def give_way(self) -> None:
        """End before the script begins a profile of its own."""
        if self.profiler is not None:
            self.abandon()
            self.bar()

    def bar(self) -> None:
        """Trace nothing any more."""
        self.session.off("segment", self.saw_segment)
        self.why = kernels.BARRED

    def abandon(self) -> None:
        """End the profiler, and keep nothing of what it saw."""
        profiler, self.profiler = self.profiler, None
        profiler.on_trace_ready = None
        profiler.stop()

    def begin_whole(self) -> None:
        """Trace as many steps as the size allows."""
        self.active = min(self.steps_wanted, self.max_bytes // self.step_bytes)
        if self.active:
            self.begin(self.active, self.keep)
            return
        self.active = -1
        self.why = (
            f"one step alone makes {self.step_bytes / 1e6:.0f} MB of trace, more than the "
            f"{self.max_bytes / 1e6:.0f} MB that viewers open"
        )

    def weigh(self, profiler: Any) -> None:
        """Note how large the trace of one step is."""
        path = self.folder / f"weighed-{os.getpid()}.json"
        profiler.export_chrome_trace(str(path))
        self.step_bytes = max(1, path.stat().st_size)
        path.unlink()
        self.profiler = None

    def keep(self, profiler: Any) -> None:
        """Write the trace, under its final name only when it is whole."""
        part = self.folder / f"part-{os.getpid()}.json.gz"
        profiler.export_chrome_trace(str(part))
        self.file = f"trace-{os.getpid()}.json.gz"
        part.replace(self.folder / self.file)
        self.why = ""
        self.profiler = None

    def result(self) -> Mapping[str, Any]:
        """Return the file's name and how its size was chosen; `why` says why there is none."""
        if self.profiler is not None:
            self.abandon()
        return {
            "file": self.file,
            "steps": max(0, self.active) if self.file else 0,
            "step_bytes": self.step_bytes,
            "why": self.why,
        }
