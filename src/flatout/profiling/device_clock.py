"""Phases on the device's own time line, by CUDA events that are read when the run is over.

The host's clock sees when kernels were launched; the device's sees when they ran. An event is
recorded at every change of phase on the current stream, and the time between two events belongs to
the phase that began with the first. Nothing is synchronised before the end. Not measured on a GPU
yet.
"""

import functools
from typing import TYPE_CHECKING, Any

from flatout.seams.clock import NAMES
from flatout.seams.events import Segment
from flatout.seams.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable


class DeviceClock:
    """Follow the session's clock with events once the first root turns out to be on CUDA."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.marks: list[tuple[int, Any]] = []
        self.bounds: list[tuple[Segment, int, int]] = []
        self.began_at = 0
        self._event: Callable[[], Any]
        session.on("root", self.begin)

    def begin(self, root: Any) -> None:
        """Start when the root lies on a CUDA device."""
        import torch

        device = next(iter(root.parameters())).device
        if device.type != "cuda" or self.marks:
            return
        self._event = functools.partial(torch.cuda.Event, enable_timing=True)
        self.session.clock.mark_with(self.mark)
        self.session.on("segment", self.lap)
        self.mark(self.session.clock.stack[-1])

    def mark(self, phase: int) -> None:
        """Record the begin of a phase."""
        event = self._event()
        event.record()
        self.marks.append((phase, event))

    def lap(self, segment: Segment) -> None:
        """Note which marks belong to the segment that just ended."""
        self.mark(self.session.clock.stack[-1])
        end = len(self.marks) - 1
        self.bounds.append((segment, self.began_at, end))
        self.began_at = end

    def resolve(self) -> None:
        """Replace the host's seconds by the device's, for every segment but the first."""
        if not self.bounds:
            return
        import torch

        torch.cuda.synchronize()
        for segment, first, last in self.bounds[1:]:
            seconds = [0.0] * len(NAMES)
            for (phase, start), (_, stop) in zip(
                self.marks[first:last], self.marks[first + 1 : last + 1], strict=True
            ):
                seconds[phase] += start.elapsed_time(stop) / 1e3
            segment.seconds = seconds
