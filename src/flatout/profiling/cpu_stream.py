"""The CPU's allocations as torch.profiler sees them: every byte that torch's allocator gave."""

from collections.abc import Iterator
from typing import Any

from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd import profiler

from flatout.profiling import one_profiler
from flatout.profiling.allocations import Event, Look, Place

PREFIX = "flatout:"
"""Begin of the names of our own remarks among the profiler's events."""


class CpuStream:
    """Record the allocations of some steps, in one run of the profiler.

    It must not end and start anew in between: the ends of steps lie within `Optimizer.step`, which
    torch records too, and a record that ends in another run than it began in writes to memory that
    is no longer its own.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.running: Any = None
        self.is_barred = False
        """Whether the script uses the profiler itself: there can be only one."""
        self._kept: list[Event] = []
        self._places: dict[Place, str] = {}
        self._remarks: list[list[Event]] = []
        one_profiler.watch()

    def start(self) -> None:
        """Begin to record."""
        running: Any = profiler.profile(use_cpu=True, profile_memory=True)
        if one_profiler.begin(running, self._give_way):
            self.running = running
        else:
            self.is_barred = True

    def at(self, place: Place) -> None:
        """Remark that the training is at this place now."""
        name = self._places.get(place)
        if name is None:
            name = self._places[place] = self._note([Event(0.0, place=place)])
        with _RecordFunctionFast(name):
            pass

    def saw(self, looks: list[tuple[int, Look]]) -> None:
        """Remark what lies at some addresses now."""
        with _RecordFunctionFast(self._note([Event(0.0, at, look=look) for at, look in looks])):
            pass

    def end_step(self) -> None:
        """Remark that a step ends."""
        with _RecordFunctionFast(self._note([Event(0.0, ends_step=True)])):
            pass

    def stop(self) -> list[Event]:
        """End the record and return what happened."""
        running, self.running = self.running, None
        if running is None:
            return self._kept
        running.__exit__(None, None, None)
        found = sorted(_raw(running.kineto_results.experimental_event_tree()), key=_moment)
        events: list[Event] = []
        for at_ns, remark, address, size in found:
            at_ms = (at_ns - found[0][0]) / 1e6
            if remark is None:
                events.append(Event(at_ms, address, size))
            else:
                events += [event._replace(at_ms=at_ms) for event in self._remarks[remark]]
        return events

    def total(self) -> int | None:
        """Return None: nobody keeps the sum of what was allocated before."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return nothing: there is no pool on the CPU."""
        return {}

    def _note(self, events: list[Event]) -> str:
        self._remarks.append(events)
        return f"{PREFIX}{len(self._remarks) - 1}"

    def _give_way(self) -> None:
        """End our own profile before the script begins one."""
        if self.running is not None:
            self.is_barred = True
            self._kept = self.stop()


def _raw(tree: Any) -> Iterator[tuple[int, int | None, int, int]]:
    """Yield moment, number of our remark, address and bytes of what concerns us."""
    waiting = list(tree)
    while waiting:
        event = waiting.pop()
        waiting += event.children
        kind, extra = event.typed
        if kind == _EventType.Allocation:
            if extra.device.type == "cpu":
                yield event.start_time_ns, None, extra.ptr, extra.alloc_size
        elif event.name.startswith(PREFIX):
            yield event.start_time_ns, int(event.name.removeprefix(PREFIX)), 0, 0


def _moment(found: tuple[int, int | None, int, int]) -> int:
    return found[0]
