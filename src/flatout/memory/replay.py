"""Play an allocation stream through the simulated allocator: what is reserved, what fits."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flatout.memory.allocator import CachingAllocator, DeviceFullError, Listener
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.stream import Component, MemoryStream

if TYPE_CHECKING:
    from flatout.memory.blocks import Block

DEFAULT = AllocatorSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What the allocator did with a stream."""

    peak_allocated: int
    """As `torch.cuda.max_memory_allocated` would return it."""
    peak_reserved: int
    """As `torch.cuda.max_memory_reserved` would return it."""
    peak_at: int
    """Position of the event at which most was allocated."""
    retries_by_step: tuple[int, ...]
    """How often memory had to be given back and asked for again, by step."""
    full_at: int | None = None
    """Position of the event that did not fit any more."""

    @property
    def fits(self) -> bool:
        """Whether every allocation found its place."""
        return self.full_at is None

    @property
    def steady_retries(self) -> int:
        """Retries from the second step on: these cost time in every step."""
        return sum(self.retries_by_step[1:])


def replay(
    stream: MemoryStream,
    settings: AllocatorSettings = DEFAULT,
    *,
    capacity: int | None = None,
    listener: Listener | None = None,
) -> Replay:
    """Return what becomes of the stream on a device with this capacity."""
    allocator = CachingAllocator(settings, capacity=capacity, listener=listener)
    player = _Player(stream, allocator)
    retries = [0] * max(1, stream.steps)
    full_at: int | None = None
    for step, start, end in _stretches(stream):
        before = allocator.books.retries
        full_at = player.play(start, end)
        retries[min(step, len(retries) - 1)] += allocator.books.retries - before
        if full_at is not None:
            break
    return Replay(
        peak_allocated=allocator.books.peak_allocated,
        peak_reserved=allocator.books.peak_reserved,
        peak_at=player.peak_at,
        retries_by_step=tuple(retries),
        full_at=full_at,
    )


def alive_at(stream: MemoryStream, position: int) -> list[int]:
    """Return the allocations that are alive right after an event, the largest first."""
    alive: set[int] = set()
    for index, born in stream.events[: position + 1]:
        (alive.add if born else alive.discard)(index)
    return sorted(alive, key=lambda index: (-stream.allocations[index].size, index))


def components_at(stream: MemoryStream, position: int) -> dict[Component, int]:
    """Return the bytes alive right after an event, by what they are for."""
    found: Counter[Component] = Counter()
    for index in alive_at(stream, position):
        found[stream.allocations[index].component] += stream.allocations[index].size
    return dict(found)


class _Player:
    """Holds the blocks of what is alive, and where most was allocated."""

    def __init__(self, stream: MemoryStream, allocator: CachingAllocator) -> None:
        self.stream = stream
        self.allocator = allocator
        self.live: dict[int, Block] = {}
        self.peak = 0
        self.peak_at = 0

    def play(self, start: int, end: int) -> int | None:
        """Play a stretch of events; return the position of the one that did not fit."""
        allocations, events, live = self.stream.allocations, self.stream.events, self.live
        allocator = self.allocator
        for position in range(start, end):
            index, born = events[position]
            if not born:
                if index in live:
                    allocator.free(live.pop(index))
                continue
            allocation = allocations[index]
            if allocation.size == 0:
                continue  # torch hands out no memory for an empty tensor
            try:
                live[index] = block = allocator.malloc(allocation.size, allocation.stream)
            except DeviceFullError:
                return position
            for other in allocation.used_on:
                allocator.record_stream(block, other)
            if allocator.books.allocated > self.peak:
                self.peak, self.peak_at = allocator.books.allocated, position
        return None


def _stretches(stream: MemoryStream) -> Iterator[tuple[int, int, int]]:
    """Yield each step with the positions between which its events lie; setup is of the first."""
    starts: dict[int, int] = {}
    for mark in stream.marks:
        starts.setdefault(mark.step, mark.at)
    steps = sorted(starts, key=lambda step: starts[step]) or [0]
    bounds = [0, *(starts[step] for step in steps[1:]), len(stream.events)]
    for number, step in enumerate(steps):
        yield step, bounds[number], bounds[number + 1]
