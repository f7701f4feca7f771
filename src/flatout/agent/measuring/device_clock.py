"""Phases on the device's own time line, by CUDA events that are read when the run is over.

The host's clock sees when kernels were launched; the device's sees when they ran. An event is
recorded at every change of phase on the stream that is current on the first root's device, and the
time between two events belongs to the phase that began with the first. Nothing is synchronised
before the end. Not compared with a clock that waits for a GPU yet.
"""

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from flatout.agent.session import Session
from flatout.records.phase_clock import NAMES
from flatout.records.trial_result import Segment


class DeviceClock:
    """Follow the session's clock with events once the first root turns out to be on CUDA."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.marks: list[tuple[int, Any]] = []
        self.bounds: list[tuple[Segment, int, int]] = []
        self.began_at = 0
        self.marking_s = 0.0
        """Seconds of the host that the marks took. Taken at each: the driver's part of them is the
        larger one, and no loop on another clock repeats it."""
        self.device: Any = None
        self.torch: Any = None
        session.on("root", self.begin)

    def begin(self, root: Any) -> None:
        """Start when the root is on a CUDA device."""
        import torch

        parameter = next(iter(root.parameters()), None)
        if parameter is None or parameter.device.type != "cuda" or self.marks:
            return
        self.torch, self.device = torch, parameter.device
        # Quietly: a device that failed tells the script so itself, at a line of its own.
        self.session.clock.mark_with(self.session.quietly(self.mark))
        self.session.on("lap", self.lap)
        self.mark(self.session.clock.stack[-1])

    def mark(self, phase: int) -> None:
        """Record the begin of a phase.

        On the device of the training: without a stream, an event is recorded on the current device,
        which has nothing to do where a script names another one in each call.
        """
        began = time.perf_counter()
        cuda = self.torch.cuda
        if self.is_capturing():
            return  # it would become a part of the script's graph, and could not be read
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self.device))
        self.marks.append((phase, event))
        self.marking_s += time.perf_counter() - began

    def is_capturing(self) -> bool:
        """Return whether the script captures a graph now, and the device may be asked nothing."""
        return bool(self.torch.cuda.is_current_stream_capturing())

    def lap(self, segment: Segment) -> None:
        """Note which marks belong to the segment that just ended."""
        self.mark(self.session.clock.stack[-1])
        end = len(self.marks) - 1
        self.bounds.append((segment, self.began_at, end))
        self.began_at = end

    def resolve(self) -> None:
        """Replace the host's seconds by the device's, for every segment but the first.

        A device that failed answers no more: then all segments keep the host's seconds.
        """
        if not self.bounds:
            return
        try:
            self.torch.cuda.synchronize(self.device)
            found = [
                (segment, phase_seconds(self.marks[first : last + 1]))
                for segment, first, last in self.bounds[1:]
            ]
        except Exception as error:  # noqa: BLE001  the result must be written all the same
            self.session.note_error(f"device times: {type(error).__name__}: {error}")
            return
        for segment, seconds in found:
            segment.seconds = seconds


def phase_seconds(marks: Sequence[tuple[int, Any]]) -> list[float]:
    """Return the seconds of each phase between the first mark and the last.

    Where a script changes streams, a later mark may lie earlier on the device: no phase then takes
    less than no time, and the sum stays what passed.
    """
    seconds = [0.0] * len(NAMES)
    _, start = marks[0]
    reached_ms = 0.0
    for (phase, _), (_, stop) in pairwise(marks):
        at_ms = max(reached_ms, start.elapsed_time(stop))
        seconds[phase] += (at_ms - reached_ms) / 1e3
        reached_ms = at_ms
    return seconds
