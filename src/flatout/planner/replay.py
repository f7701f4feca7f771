"""Play an allocation stream through the simulated allocator: what is reserved, what fits.

`replay` does it; `snapshot_of` and `write_snapshot` give the predicted run in the format of torch's
memory snapshots.
"""

import itertools
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

from flatout.planner.allocator import Block, CachingAllocator, DeviceFullError
from flatout.planner.allocator_settings import DEFAULT, AllocatorSettings
from flatout.records.memory_stream import Allocation, Component, MemoryStream


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorReplay:
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
) -> AllocatorReplay:
    """Return what becomes of the stream on a device with this capacity."""
    allocator = CachingAllocator(settings, capacity=capacity)
    player = _Player(stream, allocator)
    retries = [0] * max(1, stream.steps)
    full_at: int | None = None
    for step, start, end in _stretches(stream):
        before = allocator.retries
        full_at = player.play(start, end)
        retries[min(step, len(retries) - 1)] += allocator.retries - before
        if full_at is not None:
            break
    return AllocatorReplay(
        peak_allocated=allocator.peak_allocated,
        peak_reserved=allocator.peak_reserved,
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
            size = allocations[index].size
            if size == 0:
                continue  # torch hands out no memory for an empty tensor
            try:
                live[index] = allocator.malloc(size)
            except DeviceFullError:
                return position
            if allocator.allocated > self.peak:
                self.peak, self.peak_at = allocator.allocated, position
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


PROTOCOL = 4
"""What torch's own snapshots use, and the viewer's reader understands."""
Frames = list[dict[str, Any]]


def snapshot_of(
    stream: MemoryStream, settings: AllocatorSettings, capacity: int | None = None
) -> dict[str, Any]:
    """Return what `torch.cuda.memory._snapshot()` would return after the stream's steps.

    Where an allocation does not fit, that is the last one.
    """
    entries: list[dict[str, Any]] = []
    frames_at: dict[int, Frames] = {}
    position, frames = 0, Frames()

    def tell(action: str, address: int, size: int, number: int) -> None:
        entries.append(
            {
                "action": action,
                "device_free" if action == "oom" else "addr": address,
                "size": size,
                "stream": number,
                "time_us": position,
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames,
            }
        )

    allocator = CachingAllocator(settings, capacity=capacity, listener=tell)
    player = _Player(stream, allocator)
    for position, (index, born) in enumerate(stream.events):
        frames = _frames(stream.allocations[index])
        if player.play(position, position + 1) is not None:
            break
        if born and index in player.live:
            frames_at[player.live[index].address] = frames
    chains = (allocator.chain(base) for base in sorted(allocator.segments))
    stretches = (itertools.groupby(chain, key=attrgetter("is_mapped")) for chain in chains)
    return {
        "segments": [
            _segment([*stretch], frames_at)
            for parts in stretches
            for is_mapped, stretch in parts
            if is_mapped
        ],
        "device_traces": [entries],
        "allocator_settings": {
            "PYTORCH_CUDA_ALLOC_CONF": "",
            "expandable_segments": settings.expandable_segments,
            "garbage_collection_threshold": settings.garbage_collection_threshold,
        },
        "external_annotations": [],
    }


def write_snapshot(snapshot: dict[str, Any], path: Path) -> None:
    """Write a snapshot as the viewers want it.

    https://pytorch.org/memory_viz and `torch/cuda/_memory_viz.py` show it like a recorded one.
    Times are event numbers: a prediction has no clock.
    """
    path.write_bytes(pickle.dumps(snapshot, protocol=PROTOCOL))


def _frames(allocation: Allocation) -> Frames:
    """Return a made-up stack: the operator, the module it ran in, the user's line."""
    name, _, number = allocation.line.rpartition(":")
    line = int(number) if number.isdigit() else 0
    what = f"{allocation.phase.value} {allocation.component.value}"
    frames = [{"name": allocation.operator or what, "filename": what, "line": allocation.step}]
    if allocation.module:
        frames.append({"name": allocation.module, "filename": "module", "line": 0})
    if name:
        frames.append({"name": "<predicted>", "filename": name, "line": line})
    return frames


def _segment(chain: Sequence[Block], frames_at: dict[int, Frames]) -> dict[str, Any]:
    first = chain[0]
    active = [block for block in chain if block.allocated]
    size = sum(block.size for block in active)
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in chain),
        "allocated_size": size,
        "active_size": size,
        "requested_size": sum(block.requested for block in active),
        "stream": first.stream,
        "segment_type": "small" if first.pool.is_small else "large",
        "segment_pool_id": (0, 0),
        "is_expandable": first.is_expandable,
        "frames": [],
        "blocks": [_block(block, frames_at) for block in chain],
    }


def _block(block: Block, frames_at: dict[int, Frames]) -> dict[str, Any]:
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested if block.allocated else 0,
        "state": "active_allocated" if block.allocated else "inactive",
        "frames": frames_at.get(block.address, []) if block.allocated else [],
    }
