"""Phases on the device's own time line, by CUDA events that are read when the run is over.

The host's clock sees when kernels were launched; the device's sees when they ran. An event is
recorded at every change of phase on the stream that is current on each device of the roots, and the
time between two changes belongs to the phase that began with the first: a phase is over when all
devices have reached its end. Nothing is synchronised before the end, but for the moment in which a
further device comes in. Not compared with a clock that waits for a GPU yet.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from flatout.agent.session import Session
from flatout.records.phase_clock import NAMES
from flatout.records.trial_result import Segment


class DeviceClock:
    """Follow the session's clock with events once a root turns out to be on CUDA."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.marks: list[tuple[int, list[Any]]] = []
        """Phases that began, and the events of it, one for each device that was known by then."""
        self.bounds: list[tuple[Segment, int, int]] = []
        self.began_at = 0
        self.marking_s = 0.0
        """Seconds of the host that the marks took. Taken at each: the driver's part of them is the
        larger one, and no loop on another clock repeats it."""
        self.devices: list[Any] = []
        session.on("root", self.begin)

    @property
    def device(self) -> Any:
        """The first device that was found; None on the CPU."""
        return next(iter(self.devices), None)

    def begin(self, root: Any) -> None:
        """Start when a root is on a CUDA device, and add those that later ones are on."""
        known = dict.fromkeys([*self.devices, *(p.device for p in root.parameters())])
        found = [device for device in known if device.type == "cuda"]
        if len(found) == len(self.devices):
            return
        is_first = not self.devices
        self.devices = found
        if is_first:
            # Quietly: a device that failed tells the script so itself, at a line of its own.
            self.session.clock.mark_with(self.session.quietly(self.mark))
            self.session.on("lap", self.lap)
        if len(found) > 1 and not self.is_capturing():
            for device in found:  # their time lines have this moment in common
                torch.cuda.synchronize(device)
        self.mark(self.session.clock.stack[-1])

    def mark(self, phase: int) -> None:
        """Record the begin of a phase.

        On the devices of the training: without a stream, an event is recorded on the current one,
        which has nothing to do where a script names another one in each call.
        """
        began = time.perf_counter()
        cuda: Any = torch.cuda
        if self.is_capturing():
            return  # it would become a part of the script's graph, and could not be read
        events = [cuda.Event(enable_timing=True) for _ in self.devices]
        for event, device in zip(events, self.devices, strict=True):
            event.record(cuda.current_stream(device))
        self.marks.append((phase, events))
        self.marking_s += time.perf_counter() - began

    def is_capturing(self) -> bool:
        """Return whether the script captures a graph now, and the device may be asked nothing."""
        return bool(torch.cuda.is_current_stream_capturing())

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
            for device in self.devices:
                torch.cuda.synchronize(device)
            reached_s = list(reached_at(events for _, events in self.marks))
        except Exception as error:  # noqa: BLE001  the result must be written all the same
            self.session.note_error(f"device times: {type(error).__name__}: {error}")
            return
        for segment, first, last in self.bounds[1:]:
            segment.seconds = [0.0] * len(NAMES)
            for place in range(first, last):
                phase = self.marks[place][0]
                segment.seconds[phase] += reached_s[place + 1] - reached_s[place]


def reached_at(marks: Iterable[Sequence[Any]]) -> Iterator[float]:
    """Yield the seconds at which all devices had reached each mark, on a common time line.

    Events of two devices cannot be compared, so each is timed from the one before it on its own; a
    device that comes in later begins where the others are. Where a script changes streams, a later
    mark may lie earlier on the device: no phase then takes less than no time.
    """
    latest: list[tuple[Any, float]] = []
    reached_ms = 0.0
    for events in marks:
        for number, event in enumerate(events):
            if number < len(latest):
                before, at_ms = latest[number]
                latest[number] = event, at_ms + before.elapsed_time(event)
            else:
                latest.append((event, max((at_ms for _, at_ms in latest), default=0.0)))
        reached_ms = max([reached_ms, *(at_ms for _, at_ms in latest)])
        yield reached_ms / 1e3
