"""CUDA's allocations as torch's own memory history tells them. Not measured on a GPU yet.

Remarks are put between the recorded allocations by the allocator's counters: allocations and frees
so far. The peak of every phase is the allocator's own, which knows of rounding and of what is
split; the history knows what was asked for.
"""

from typing import Any

import torch

from flatout.profiling.allocations import Event, Look, Place

ROUNDING_BYTES = 512
"""Blocks of the CUDA allocator are multiples of this (c10/cuda/CUDACachingAllocator, kMinBlockSize)
and that is what its counters add up."""
MAX_ENTRIES = 1_000_000
"""Entries of the history: one step of a large model has some ten thousand."""
ENDS = "free_requested"
"""The moment at which a tensor gives its memory back; the allocator may keep it longer."""


class CudaStream:
    """Record the allocations of some steps on one device."""

    device = "cuda"
    is_barred = False

    def __init__(self, number: int, snapshot: str | None = None) -> None:
        self.number = number
        self.snapshot = snapshot
        self.phase = ""
        self.peaks: dict[str, int] = {}
        self.reserved_peak = 0
        self._began = 0
        self._remarks: list[tuple[int, list[Event]]] = []
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

    def at(self, place: Place) -> None:
        """Remark that the training is at this place now."""
        stats = self._stats()
        self._remarks.append((_calls(stats), [Event(0.0, place=place)]))
        if place.phase != self.phase:
            self._note_peak(stats)
            self.phase = place.phase

    def saw(self, looks: list[tuple[int, Look]]) -> None:
        """Remark what lies at some addresses now."""
        events = [Event(0.0, address, look=look) for address, look in looks]
        self._remarks.append((_calls(self._stats()), events))

    def end_step(self) -> None:
        """Remark that a step ends."""
        self._remarks.append((_calls(self._stats()), [Event(0.0, ends_step=True)]))

    def stop(self) -> list[Event]:
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
        peak = int(stats["allocated_bytes"]["all"]["peak"])
        self.peaks[self.phase] = max(peak, self.peaks.get(self.phase, 0))
        self.reserved_peak = max(self.reserved_peak, int(stats["reserved_bytes"]["all"]["peak"]))
        torch.cuda.reset_peak_memory_stats(self.number)


def _calls(stats: Any) -> int:
    counts = stats["allocation"]["all"]
    return int(counts["allocated"]) + int(counts["freed"])


def _woven(
    calls: list[dict[str, Any]], remarks: list[tuple[int, list[Event]]], began: int
) -> list[Event]:
    """Return allocations and remarks in the order in which they happened."""
    events: list[Event] = []
    waiting = iter(remarks)
    remark = next(waiting, None)
    zero_us = calls[0].get("time_us", 0) if calls else 0
    for number, call in enumerate(calls, start=began):
        at_ms = (call.get("time_us", 0) - zero_us) / 1e3
        while remark is not None and remark[0] <= number:
            events += [event._replace(at_ms=at_ms) for event in remark[1]]
            remark = next(waiting, None)
        size = -(-call["size"] // ROUNDING_BYTES) * ROUNDING_BYTES
        events.append(Event(at_ms, call["addr"], size if call["action"] == "alloc" else -size))
    at_ms = events[-1].at_ms if events else 0.0
    while remark is not None:
        events += [event._replace(at_ms=at_ms) for event in remark[1]]
        remark = next(waiting, None)
    return events
