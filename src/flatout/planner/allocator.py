"""A simulation of torch's caching allocator on a device that does not exist here.

`CachingAllocator` follows c10/cuda/CUDACachingAllocator.cpp: two pools, rounding, best fit,
splitting, merging, garbage collection, expandable segments, streams, and what happens when the
device is full. Private pools of CUDA graphs are not simulated. `Block` and `Pool` are its memory.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from flatout.planner.allocator_settings import (
    MIN_BLOCK,
    SMALL_SEGMENT,
    SMALL_SIZE,
    AllocatorSettings,
)
from flatout.records.units import GIB, MIB


class Block:
    """A piece of a segment. Mutable and slotted: millions of them pass through a search."""

    __slots__ = (
        "address",
        "allocated",
        "base",
        "events",
        "is_expandable",
        "is_mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "searched",
        "size",
        "stream",
        "uses",
    )

    def __init__(self, address: int, size: int, pool: "Pool", stream: int, base: int) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.stream = stream
        self.base = base
        """Address of the segment it is cut from."""
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.is_mapped = True
        self.is_expandable = False
        self.requested = 0
        self.uses: set[int] = set()
        """Other streams that use it (`record_stream`)."""
        self.events = 0
        """Events of other streams that have to be over before it is free."""
        self.searched = 0
        """The pool's count of searches when it became free, for garbage collection."""

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    @property
    def is_free(self) -> bool:
        """Whether it may be given out: not allocated, and no other stream still uses it."""
        return not (self.allocated or self.events or self.uses)

    def reach(self) -> int:
        """Return its size with what could be mapped right behind it."""
        behind = self.next
        return self.size + (behind.size if behind is not None and not behind.is_mapped else 0)

    def insert_between(self, before: "Block | None", after: "Block | None") -> None:
        """Link it into the chain of its segment."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """Free blocks by stream and size, and the unmapped ends of expandable segments."""

    __slots__ = ("_by_address", "_free", "_unmapped", "is_small", "searches")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self.searches = 0
        self._free: dict[int, list[tuple[int, int]]] = {}
        self._unmapped: dict[int, list[int]] = {}
        self._by_address: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Take a free block in."""
        insort(self._free.setdefault(block.stream, []), (block.size, block.address))
        self._by_address[block.address] = block
        block.searched = self.searches

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        keys = self._free[block.stream]
        del keys[bisect_left(keys, (block.size, block.address))]
        del self._by_address[block.address]

    def at_least(self, stream: int, size: int) -> Iterator[Block]:
        """Yield free blocks of a stream from this size on, the smallest first, then by address."""
        keys = self._free.get(stream, [])
        for position in range(bisect_left(keys, (size, 0)), len(keys)):
            yield self._by_address[keys[position][1]]

    def below(self, stream: int, size: int) -> Iterator[Block]:
        """Yield free blocks of a stream below this size, the largest first."""
        keys = self._free.get(stream, [])
        for _size, address in reversed(keys[: bisect_left(keys, (size, 0))]):
            yield self._by_address[address]

    def free_blocks(self) -> list[Block]:
        """Return all free blocks by stream, size and address."""
        return [
            self._by_address[address]
            for stream in sorted(self._free)
            for _size, address in self._free[stream]
        ]

    def add_unmapped(self, block: Block) -> None:
        """Take in address space that no memory is behind."""
        insort(self._unmapped.setdefault(block.stream, []), block.address)
        self._by_address[block.address] = block

    def remove_unmapped(self, block: Block) -> None:
        """Take unmapped address space out."""
        addresses = self._unmapped[block.stream]
        del addresses[bisect_left(addresses, block.address)]
        del self._by_address[block.address]

    def unmapped(self, stream: int) -> list[Block]:
        """Return a stream's unmapped address space, the lowest address first."""
        return [self._by_address[address] for address in self._unmapped.get(stream, ())]


def merge(block: Block, neighbour: Block | None) -> bool:
    """Let a block take in a free neighbour of the same kind; the neighbour leaves its pool."""
    if neighbour is None or not neighbour.is_free or neighbour.is_mapped != block.is_mapped:
        return False
    leave = neighbour.pool.remove if neighbour.is_mapped else neighbour.pool.remove_unmapped
    leave(neighbour)
    block.size += neighbour.size
    if neighbour is block.prev:
        block.address = neighbour.address
        block.insert_between(neighbour.prev, block.next)
    else:
        block.insert_between(block.prev, neighbour.next)
    return True


FIRST_ADDRESS = 0x7F00_0000_0000
"""Where the made-up addresses begin; what a viewer shows looks like those of a real device."""
CONTEXT_RANGE = 414 * MIB
"""The driver hands out the range that the context left free upwards, then ever lower addresses. Of
equally large free blocks torch takes the lowest, so the order decides what is reserved. Size seen
in 16 recorded runs on an H200 (driver 580, CUDA 13); with it each of them is simulated exactly."""
TOTAL_BYTES = 192 * GIB
"""Address space of an expandable segment follows from it where no capacity is given."""

DEFAULT = AllocatorSettings()

Listener = Callable[[str, int, int, int], None]
"""Is told an action as torch's snapshots name it, an address, a size and a stream."""


class DeviceFullError(Exception):
    """The simulated device cannot give what was asked for, not even after all was given back."""


@dataclass(slots=True)
class AllocatorBooks:
    """What the allocator counts, as `torch.cuda.memory_stats` does."""

    allocated: int = 0
    requested: int = 0
    active: int = 0
    """Allocated, or waiting for another stream."""
    reserved: int = 0
    peak_allocated: int = 0
    peak_requested: int = 0
    peak_active: int = 0
    peak_reserved: int = 0
    retries: int = 0

    def take(self, size: int, requested: int) -> None:
        """Count a block that is given out."""
        self.allocated += size
        self.active += size
        self.requested += requested
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self.peak_active = max(self.peak_active, self.active)
        self.peak_requested = max(self.peak_requested, self.requested)

    def reserve(self, size: int) -> None:
        """Count memory that comes from the device."""
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def release(self, size: int) -> None:
        """Count memory that goes back to the device."""
        self.reserved -= size


class CachingAllocator:
    """One device's memory as torch hands it out.

    Args:
        settings: What PYTORCH_ALLOC_CONF asks for.
        capacity: Bytes that the device gives this process; None has no end.
        release_delay: How many allocations pass before an event of another stream is over.
        listener: Is told everything that a recorded snapshot would hold.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT,
        *,
        capacity: int | None = None,
        release_delay: int = 0,
        listener: Listener | None = None,
    ) -> None:
        self.settings = settings
        self.capacity = capacity
        self.allowed: int | None = None
        """What the memory fraction leaves; garbage collection works only where it is set."""
        if capacity is not None and settings.memory_fraction is not None:
            self.allowed = int(settings.memory_fraction * capacity)
        self.books = AllocatorBooks()
        self.segments: dict[int, int] = {}
        """Address and size of every segment; of an expandable one its whole address space."""
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._first: dict[int, Block] = {}
        self._delay = release_delay
        self._waiting: list[tuple[int, Block]] = []
        self._calls = 0
        self._rising = self._falling = FIRST_ADDRESS
        self._tell = listener or (lambda *_: None)

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Give out a block of at least this size.

        Raises:
            DeviceFullError: if there is not enough, even after the cache was given back.
        """
        self._calls += 1
        self._finish_events(self._calls)
        rounded = self.settings.rounded(size)
        pool = self._small if rounded <= SMALL_SIZE else self._large
        block = self._cached(pool, rounded, stream) or self._fresh(pool, rounded, stream)
        if self._splits(block, rounded):
            rest = Block(block.address + rounded, block.size - rounded, pool, stream, block.base)
            rest.is_expandable = block.is_expandable
            block.size = rounded
            rest.insert_between(block, block.next)
            pool.add(rest)
        block.allocated, block.requested = True, size
        self.books.take(block.size, size)
        self._tell("alloc", block.address, size, stream)
        return block

    def free(self, block: Block) -> None:
        """Take a block back; one that other streams use becomes free when their events are over."""
        block.allocated = False
        self.books.allocated -= block.size
        self._tell("free_requested", block.address, block.requested, block.stream)
        if not block.uses:
            self._free_now(block)
            return
        block.events, block.uses = len(block.uses), set()
        due = self._calls + self._delay + 1
        self._waiting.extend((due, block) for _ in range(block.events))

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses the block; its own stream needs no note."""
        if stream != block.stream:
            block.uses.add(stream)

    def empty_cache(self) -> None:
        """Give every unused segment back to the device."""
        self._finish_events(None)
        for pool in (self._large, self._small):
            free = pool.free_blocks()
            for block in free:
                if not block.is_expandable and not block.is_split:
                    self._release(block)
            for block in free:
                if block.is_expandable:
                    self._unmap(block)

    def chain(self, address: int) -> list[Block]:
        """Return the blocks of a segment by address."""
        block: Block | None = self._first[address]
        while block is not None and block.prev is not None:
            block = block.prev
        blocks = []
        while block is not None:
            blocks.append(block)
            block = block.next
        return blocks

    def _cached(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the best fit out of the cache."""
        if self._collects:
            pool.searches += 1
        candidates = pool.at_least(stream, size)
        block = next(candidates, None)
        if block is None:
            return None
        if block.is_expandable:
            for larger in candidates:
                if larger.reach() >= block.reach():
                    break
                block = larger
        if not self._may_take(block, size):
            return None
        pool.remove(block)
        return block

    def _may_take(self, block: Block, size: int) -> bool:
        limit = self.settings.max_split_size
        if limit is None:
            return True
        if size < limit:
            return block.size < limit
        return block.size < size + self.settings.max_non_split_rounding

    def _fresh(self, pool: Pool, size: int, stream: int) -> Block:
        """Get memory from the device, giving back what is unused where it is full."""
        if self._collects:
            self._collect()
        block = self._from_device(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._from_device(pool, size, stream)
        if block is None:
            self.empty_cache()
            self.books.retries += 1
            block = self._from_device(pool, size, stream)
        if block is None:
            self._tell("oom", self._left(), size, stream)
            raise DeviceFullError(
                f"{size} bytes asked for, {self.books.allocated} allocated, "
                f"{self.books.reserved} reserved of {self.capacity}"
            )
        return block

    def _from_device(self, pool: Pool, size: int, stream: int) -> Block | None:
        wanted = self.settings.segment_size(size)
        if self.allowed is not None and self.books.reserved + wanted > self.allowed:
            return None
        if self.settings.expandable_segments:
            return self._expanded(pool, size, stream)
        if wanted > self._left():
            return None
        block = self._segment(pool, wanted, stream)
        self.books.reserve(wanted)
        self._tell("segment_alloc", block.address, wanted, stream)
        return block

    def _segment(self, pool: Pool, size: int, stream: int) -> Block:
        address = self._rising
        if address + size <= FIRST_ADDRESS + CONTEXT_RANGE:
            self._rising += size
        else:
            self._falling -= size
            address = self._falling
        block = Block(address, size, pool, stream, address)
        self.segments[address] = size
        self._first[address] = block
        return block

    def _left(self) -> int:
        return sys.maxsize if self.capacity is None else self.capacity - self.books.reserved

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and rest > SMALL_SIZE

    def _free_now(self, block: Block) -> None:
        self._tell("free_completed", block.address, block.requested, block.stream)
        self.books.active -= block.size
        self.books.requested -= block.requested
        merge(block, block.prev)
        merge(block, block.next)
        block.pool.add(block)
        self._first[block.base] = block

    def _finish_events(self, until: int | None) -> None:
        """Free the blocks whose events are over by this call; None waits for all."""
        waiting, self._waiting = self._waiting, []
        for due, block in waiting:
            if until is not None and due > until:
                self._waiting.append((due, block))
                continue
            block.events -= 1
            if block.events == 0:
                self._free_now(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        del self.segments[block.base], self._first[block.base]
        self.books.release(block.size)
        self._tell("segment_free", block.address, block.size, block.stream)

    def _release_oversize(self, pool: Pool, size: int, stream: int) -> bool:
        """Give back one block that is large enough, or several, where splitting is limited."""
        limit = self.settings.max_split_size
        if limit is None or self.settings.expandable_segments:
            return False
        wanted = max(size, limit)
        block = next(pool.at_least(stream, wanted), None)
        if block is not None:
            self._release(block)
            return True
        released = 0
        for block in list(pool.below(stream, wanted)):
            if released >= wanted or block.size < limit:
                break
            released += block.size
            self._release(block)
        return released >= wanted

    @property
    def _collects(self) -> bool:
        return self.allowed is not None and self.settings.garbage_collection_threshold > 0

    def _collect(self) -> None:
        """Give back the unused segments that were not taken for longest, until it suffices."""
        assert self.allowed is not None
        excess = self.books.reserved - int(
            self.settings.garbage_collection_threshold * self.allowed
        )
        unused = [block for block in self._large.free_blocks() if not block.is_split]
        unused = [block for block in unused if not block.is_expandable]
        while excess > 0 and unused:
            ages = [self._large.searches - block.searched for block in unused]
            average = sum(ages) / len(ages)
            old = [b for b, age in zip(unused, ages, strict=True) if age >= average]
            for block in old:
                excess -= block.size
                self._release(block)
            unused = [block for block in unused if block not in old]

    def _expanded(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Map memory behind the lowest address space that has room."""
        block = self._with_space(pool, size, stream)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            behind = block.next
            assert behind is not None
            if not self._map(behind, min(size - block.size, behind.size)):
                return None
            block = behind  # it took in what lay before it
        pool.remove(block)
        return block

    def _with_space(self, pool: Pool, size: int, stream: int) -> Block:
        for candidate in pool.unmapped(stream):
            before = candidate.prev
            start = before if before is not None and before.is_free else candidate
            if _has_space(start, size):
                return start
        page, total = self._page(pool), max(self.capacity or TOTAL_BYTES, size)
        span = -(-(total + total // 8) // page) * page
        block = self._segment(pool, span, stream)
        block.is_mapped, block.is_expandable = False, True
        pool.add_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first pages of an unmapped block and let it join its neighbours."""
        page = self._page(block.pool)
        mapped = min(-(-size // page) * page, block.size)
        if mapped > self._left():
            return False
        block.pool.remove_unmapped(block)
        self._tell("segment_map", block.address, mapped, block.stream)
        self._cut(block, mapped, is_mapped=False)
        block.is_mapped = True
        merge(block, block.prev)
        merge(block, block.next)
        block.pool.add(block)
        self._first[block.base] = block
        self.books.reserve(mapped)
        return True

    def _unmap(self, block: Block) -> None:
        """Give back the whole pages of a free block of an expandable segment."""
        page = self._page(block.pool)
        start = block.base + -(-(block.address - block.base) // page) * page
        end = block.base + (block.address + block.size - block.base) // page * page
        if end <= start:
            return
        block.pool.remove(block)
        if start > block.address:
            ahead = block
            block = self._cut(ahead, start - ahead.address, is_mapped=True, takes_in=False)
            block.pool.add(ahead)
        self._cut(block, end - start, is_mapped=True)
        block.is_mapped = False
        self.books.release(block.size)
        self._tell("segment_unmap", block.address, block.size, block.stream)
        merge(block, block.prev)
        merge(block, block.next)
        block.pool.add_unmapped(block)
        self._first[block.base] = block

    def _cut(self, block: Block, size: int, *, is_mapped: bool, takes_in: bool = True) -> Block:
        """Shorten a block; what is cut off goes to the pool (or back to the caller)."""
        if size == block.size:
            return block
        rest = Block(block.address + size, block.size - size, block.pool, block.stream, block.base)
        rest.is_expandable, rest.is_mapped = True, is_mapped
        block.size = size
        rest.insert_between(block, block.next)
        if takes_in:
            (rest.pool.add if is_mapped else rest.pool.add_unmapped)(rest)
        return rest

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self.settings.large_segment


def _has_space(block: Block | None, size: int) -> bool:
    found = 0
    while found < size and block is not None and block.is_free:
        found += block.size
        block = block.next
    return found >= size
