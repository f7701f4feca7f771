"""Every allocation of some steps in the training process, in the order in which they happened.

`CpuStream` reads torch.profiler, which sees every byte that torch's CPU allocator gave.
`CudaStream` reads torch's own memory history. Not measured on a GPU yet.
"""

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._C._profiler import _EventType, _RecordFunctionFast
from torch.autograd import profiler

from flatout.agent.measuring import kernels
from flatout.analysis.allocations import AllocationEvent, AllocationLook, AllocationSite

PREFIX = "flatout:"
"""Begin of the names of our own remarks among the profiler's events."""


class CpuStream:
    """Record the allocations of some steps, in one run of the profiler.

    It must not end and start again in between: the ends of steps are within `Optimizer.step`, which
    torch records too, and a record that ends in another run than it began in writes to memory that
    is no longer its own.
    """

    device = "cpu"

    def __init__(self) -> None:
        self.running: Any = None
        self.is_barred = False
        """Whether the script uses the profiler itself: there can be only one."""
        self._kept: list[AllocationEvent] = []
        self._places: dict[AllocationSite, str] = {}
        self._remarks: list[list[AllocationEvent]] = []
        kernels.watch()

    def start(self) -> None:
        """Begin to record."""
        running: Any = profiler.profile(use_cpu=True, profile_memory=True)
        if kernels.begin(running, self._give_way):
            self.running = running
        else:
            self.is_barred = True

    def at(self, place: AllocationSite) -> None:
        """Remark that the training is at this place now."""
        name = self._places.get(place)
        if name is None:
            name = self._places[place] = self._note([AllocationEvent(0.0, place=place)])
        with _RecordFunctionFast(name):
            pass

    def saw(self, looks: list[tuple[int, AllocationLook]]) -> None:
        """Remark what is at some addresses now."""
        with _RecordFunctionFast(
            self._note([AllocationEvent(0.0, at, look=look) for at, look in looks])
        ):
            pass

    def end_step(self) -> None:
        """Remark that a step ends."""
        with _RecordFunctionFast(self._note([AllocationEvent(0.0, ends_step=True)])):
            pass

    def stop(self) -> list[AllocationEvent]:
        """End the record and return what happened."""
        running, self.running = self.running, None
        if running is None:
            return self._kept
        running.__exit__(None, None, None)
        tree = running.kineto_results.experimental_event_tree()
        found = sorted(_raw(tree), key=operator.itemgetter(0))
        events: list[AllocationEvent] = []
        for at_ns, remark, address, size in found:
            at_ms = (at_ns - found[0][0]) / 1e6
            if remark is None:
                events.append(AllocationEvent(at_ms, address, size))
            else:
                events += [event._replace(at_ms=at_ms) for event in self._remarks[remark]]
        return events

    def total(self) -> int | None:
        """Return None: no one keeps the sum of what was allocated before."""
        return None

    def facts(self) -> dict[str, Any]:
        """Return nothing: there is no pool on the CPU."""
        return {}

    def _note(self, events: list[AllocationEvent]) -> str:
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


ROUNDING_BYTES = 512
"""Blocks of the CUDA allocator are multiples of this (c10/cuda/CUDACachingAllocator, kMinBlockSize)
and that is what its counters add up."""
MAX_ENTRIES = 1_000_000
"""Entries of the history: one step of a large model has some ten thousand."""
ENDS = "free_requested"
"""The moment at which a tensor gives its memory back; the allocator may keep it longer."""


class CudaStream:
    """Record the allocations of some steps on one device.

    Remarks are put between the recorded allocations by the allocator's counters: allocations and
    frees so far. The peak of every phase is the allocator's own, which knows of rounding and of
    what is split; the history knows what was asked for.
    """

    device = "cuda"
    is_barred = False

    def __init__(self, number: int, snapshot: str | None = None) -> None:
        self.number = number
        self.snapshot = snapshot
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self.reserved_peak = 0
        self._began = 0
        self._remarks: list[tuple[int, list[AllocationEvent]]] = []
        self._is_running = False

    def start(self) -> None:
        """Begin to record."""
        context = "alloc" if self.snapshot else None
        torch.cuda.memory._record_memory_history(
            "all", context=context, stacks="python", max_entries=MAX_ENTRIES
        )
        torch.cuda.reset_peak_memory_stats(self.number)
        self._began = _calls(self._stats())
        self._is_running = True

    def at(self, place: AllocationSite) -> None:
        """Remark that the training is at this place now."""
        stats = self._stats()
        self._remarks.append((_calls(stats), [AllocationEvent(0.0, place=place)]))
        if place.phase != self.phase:
            self._note_peak(stats)
            self.phase = place.phase

    def saw(self, looks: list[tuple[int, AllocationLook]]) -> None:
        """Remark what is at some addresses now."""
        events = [AllocationEvent(0.0, address, look=look) for address, look in looks]
        self._remarks.append((_calls(self._stats()), events))

    def end_step(self) -> None:
        """Remark that a step ends."""
        self._remarks.append((_calls(self._stats()), [AllocationEvent(0.0, ends_step=True)]))

    def stop(self) -> list[AllocationEvent]:
        """End the record and return what happened."""
        if not self._is_running:
            return []
        self._is_running = False
        stats = self._stats()
        self._note_peak(stats)
        memory: Any = torch.cuda.memory
        history = memory._snapshot()["device_traces"][self.number]
        if self.snapshot:
            memory._dump_snapshot(self.snapshot)
        memory._record_memory_history(None)
        calls = [entry for entry in history if entry["action"] in ("alloc", ENDS)]
        calls = calls[max(0, len(calls) - (_calls(stats) - self._began)) :]
        return _woven(calls, self._remarks, self._began)

    def total(self) -> int | None:
        """Return what the allocator says is allocated."""
        return int(torch.cuda.memory_allocated(self.number))

    def facts(self) -> dict[str, Any]:
        """Return what only the allocator knows."""
        stats = self._stats()
        peak = max(self.peaks.values(), default=0)
        return {
            "peaks": self.peaks,
            "reserved_bytes": self.reserved_peak,
            "fragmentation_share": 1 - peak / self.reserved_peak if self.reserved_peak else None,
            "allocation_retries": int(stats["num_alloc_retries"]),
            "inactive_split_bytes": int(stats["inactive_split_bytes"]["all"]["current"]),
            "snapshot": self.snapshot,
        }

    def _stats(self) -> Any:
        return torch._C._cuda_memoryStats(self.number)

    def _note_peak(self, stats: Any) -> None:
        """Give the phase that ends its peak and start the next one's."""
        if self.phase:  # none before the first
            peak = int(stats["allocated_bytes"]["all"]["peak"])
            self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0))
        self.reserved_peak = max(self.reserved_peak, int(stats["reserved_bytes"]["all"]["peak"]))
        torch.cuda.reset_peak_memory_stats(self.number)


def _calls(stats: Any) -> int:
    counts = stats["allocation"]["all"]
    return int(counts["allocated"]) + int(counts["freed"])


def _woven(
    calls: list[dict[str, Any]], remarks: list[tuple[int, list[AllocationEvent]]], began: int
) -> list[AllocationEvent]:
    """Return allocations and remarks in the order in which they happened."""
    events: list[AllocationEvent] = []
    waiting = iter(remarks)
    remark = next(waiting, None)
    zero_us = calls[0].get("time_us", 0) if calls else 0
    for number, call in enumerate(calls, start=began):
        at_ms = (call.get("time_us", 0) - zero_us) / 1e3
        while remark is not None and remark[0] <= number:
            events += [event._replace(at_ms=at_ms) for event in remark[1]]
            remark = next(waiting, None)
        size = -(-call["size"] // ROUNDING_BYTES) * ROUNDING_BYTES
        events.append(
            AllocationEvent(at_ms, call["addr"], size if call["action"] == "alloc" else -size)
        )
    at_ms = events[-1].at_ms if events else 0.0
    while remark is not None:
        events += [event._replace(at_ms=at_ms) for event in remark[1]]
        remark = next(waiting, None)
    return events
