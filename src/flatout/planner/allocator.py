"""A simulation of torch's caching allocator on a device that does not exist here.

`CachingAllocator` follows c10/cuda/CUDACachingAllocator.cpp: two pools, rounding, best fit,
splitting, merging, expandable segments, and what happens when the device is full. Private pools of
CUDA graphs are not simulated. `Block` and `Pool` are its memory.
"""

import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

from flatout.planner.allocator_settings import (
    DEFAULT,
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
        "is_expandable",
        "is_mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "size",
        "stream",
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

    @property
    def is_split(self) -> bool:
        """Whether it shares its segment with other blocks."""
        return self.prev is not None or self.next is not None

    def reach(self) -> int:
        """Return its size with what could be mapped right behind it."""
        behind = self.next
        return self.size + (behind.size if behind is not None and not behind.is_mapped else 0)

    def cut(self, size: int) -> "Block":
        """Shorten it to this size; return what is cut off, which is then the next one."""
        rest = Block(self.address + size, self.size - size, self.pool, self.stream, self.base)
        rest.is_expandable, rest.is_mapped = self.is_expandable, self.is_mapped
        rest.prev, rest.next = self, self.next
        if self.next is not None:
            self.next.prev = rest
        self.size, self.next = size, rest
        return rest

    def joined(self) -> "Block":
        """Return it with its free neighbours of the same kind, which leave their pool.

        The first of them stays: a segment's first block is the same one for as long as it lasts.
        """
        first = self
        if self.prev is not None and self._is_like(self.prev):
            first = self.prev
            first.pool.remove(first)
            first._take_in(self)
        if first.next is not None and self._is_like(first.next):
            first.pool.remove(first.next)
            first._take_in(first.next)
        return first

    def _is_like(self, neighbour: "Block") -> bool:
        return not neighbour.allocated and neighbour.is_mapped == self.is_mapped

    def _take_in(self, behind: "Block") -> None:
        self.size += behind.size
        self.next = behind.next
        if self.next is not None:
            self.next.prev = self


class Pool:
    """Free blocks by stream and size, and by address where no memory is behind them."""

    __slots__ = ("_by_address", "_keys", "is_small")

    def __init__(self, *, is_small: bool) -> None:
        self.is_small = is_small
        self._keys: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        """By stream, and whether there is memory; sizes count among those with memory only."""
        self._by_address: dict[int, Block] = {}

    def add(self, block: Block) -> None:
        """Take a free block in."""
        keys = self._keys.setdefault((block.stream, block.is_mapped), [])
        insort(keys, (block.size if block.is_mapped else 0, block.address))
        self._by_address[block.address] = block

    def remove(self, block: Block) -> None:
        """Take a free block out."""
        keys = self._keys[block.stream, block.is_mapped]
        del keys[bisect_left(keys, (block.size if block.is_mapped else 0, block.address))]
        del self._by_address[block.address]

    def at_least(self, stream: int, size: int) -> Iterator[Block]:
        """Yield free blocks of a stream from this size on, the smallest first, then by address."""
        keys = self._keys.get((stream, True), [])
        for position in range(bisect_left(keys, (size, 0)), len(keys)):
            yield self._by_address[keys[position][1]]

    def free_blocks(self) -> list[Block]:
        """Return all free blocks with memory by stream, size and address."""
        return [
            self._by_address[address]
            for stream, is_mapped in sorted(self._keys)
            if is_mapped
            for _, address in self._keys[stream, is_mapped]
        ]

    def unmapped(self, stream: int) -> list[Block]:
        """Return a stream's unmapped address space, the lowest address first."""
        return [self._by_address[address] for _, address in self._keys.get((stream, False), ())]


FIRST_ADDRESS = 0x7F00_0000_0000
"""Where the made-up addresses begin; what a viewer shows looks like those of a real device."""
CONTEXT_RANGE = 414 * MIB
"""The driver hands out the range that the context left free upwards, then ever lower addresses. Of
equally large free blocks torch takes the lowest, so the order decides what is reserved. Size seen
in 16 recorded runs on an H200 (driver 580, CUDA 13); with it each of them is simulated exactly."""
TOTAL_BYTES = 192 * GIB
"""Address space of an expandable segment follows from it where no capacity is given."""

Listener = Callable[[str, int, int, int], None]
"""Is told an action as torch's snapshots name it, an address, a size and a stream."""


class DeviceFullError(Exception):
    """The simulated device cannot give what was asked for, not even after all was given back."""


class CachingAllocator:
    """One device's memory as torch hands it out.

    Args:
        settings: What PYTORCH_ALLOC_CONF asks for.
        capacity: Bytes that the device gives this process; None has no end.
        listener: Is told everything that a recorded snapshot would hold.
    """

    def __init__(
        self,
        settings: AllocatorSettings = DEFAULT,
        *,
        capacity: int | None = None,
        listener: Listener | None = None,
    ) -> None:
        self.settings = settings
        self.capacity = capacity
        if capacity is not None and settings.memory_fraction is not None:
            self.capacity = int(settings.memory_fraction * capacity)
        self.allocated = self.reserved = 0
        """Bytes given out, and held of the device."""
        self.peak_allocated = self.peak_reserved = 0
        self.retries = 0
        """How often memory was given back because the device was full."""
        self.segments: dict[int, Block] = {}
        """The first block of every segment, by its address."""
        self._small, self._large = Pool(is_small=True), Pool(is_small=False)
        self._rising = self._falling = FIRST_ADDRESS
        self._tell = listener or (lambda *_: None)

    def malloc(self, size: int, stream: int = 0) -> Block:
        """Give out a block of at least this size.

        Raises:
            DeviceFullError: if there is not enough, even after the cache was given back.
        """
        rounded = self.settings.rounded(size)
        pool = self._small if rounded <= SMALL_SIZE else self._large
        block = self._cached(pool, rounded, stream) or self._fresh(pool, rounded, stream)
        if self._splits(block, rounded):
            pool.add(block.cut(rounded))
        block.allocated, block.requested = True, size
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        self._tell("alloc", block.address, size, stream)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        block.allocated = False
        self.allocated -= block.size
        self._tell("free_requested", block.address, block.requested, block.stream)
        self._tell("free_completed", block.address, block.requested, block.stream)
        block.pool.add(block.joined())

    def empty_cache(self) -> None:
        """Give every unused segment back to the device."""
        for pool in (self._large, self._small):
            for block in pool.free_blocks():
                if block.is_expandable:
                    self._unmap(block)
                elif not block.is_split:
                    self._release(block)

    def chain(self, address: int) -> list[Block]:
        """Return the blocks of a segment by address."""
        blocks = []
        block: Block | None = self.segments[address]
        while block is not None:
            blocks.append(block)
            block = block.next
        return blocks

    def _cached(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the best fit out of the cache."""
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
        block = self._from_device(pool, size, stream)
        if block is None and self._release_oversize(pool, size, stream):
            block = self._from_device(pool, size, stream)
        if block is None:
            self.empty_cache()
            self.retries += 1
            block = self._from_device(pool, size, stream)
        if block is None:
            self._tell("oom", self._left(), size, stream)
            raise DeviceFullError(
                f"{size} bytes asked for, {self.allocated} allocated, "
                f"{self.reserved} reserved of {self.capacity}"
            )
        return block

    def _from_device(self, pool: Pool, size: int, stream: int) -> Block | None:
        wanted = self.settings.segment_size(size)
        # Where a share of the device is set, torch asks for a whole segment before it maps pages.
        maps_pages = self.settings.expandable_segments and self.settings.memory_fraction is None
        if not maps_pages and wanted > self._left():
            return None
        if self.settings.expandable_segments:
            return self._expanded(pool, size, stream)
        block = self._segment(pool, wanted, stream)
        self._reserve(wanted)
        self._tell("segment_alloc", block.address, wanted, stream)
        return block

    def _segment(self, pool: Pool, size: int, stream: int) -> Block:
        address = self._rising
        if address + size <= FIRST_ADDRESS + CONTEXT_RANGE:
            self._rising += size
        else:
            self._falling -= size
            address = self._falling
        block = self.segments[address] = Block(address, size, pool, stream, address)
        return block

    def _reserve(self, size: int) -> None:
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _left(self) -> int:
        return sys.maxsize if self.capacity is None else self.capacity - self.reserved

    def _splits(self, block: Block, size: int) -> bool:
        rest = block.size - size
        if block.pool.is_small or self.settings.expandable_segments:
            return rest >= MIN_BLOCK
        limit = self.settings.max_split_size
        return (limit is None or size < limit) and rest > SMALL_SIZE

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        del self.segments[block.base]
        self.reserved -= block.size
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
        for block in reversed([*pool.at_least(stream, limit)]):
            if released >= wanted:
                break
            released += block.size
            self._release(block)
        return released >= wanted

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
        pool.remove(block)
        return block

    def _with_space(self, pool: Pool, size: int, stream: int) -> Block:
        for candidate in pool.unmapped(stream):
            before = candidate.prev
            start = candidate if before is None or before.allocated else before
            if _has_space(start, size):
                return start
        page, total = self._page(pool), max(self.capacity or TOTAL_BYTES, size)
        span = -(-(total + total // 8) // page) * page
        block = self._segment(pool, span, stream)
        block.is_mapped, block.is_expandable = False, True
        pool.add(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Put memory behind the first pages of an unmapped block, which then joins the one before.

        Return whether the device had so much.
        """
        page = self._page(block.pool)
        mapped = min(-(-size // page) * page, block.size)
        if mapped > self._left():
            return False
        block.pool.remove(block)
        self._tell("segment_map", block.address, mapped, block.stream)
        if mapped < block.size:
            block.pool.add(block.cut(mapped))
        block.is_mapped = True
        block.pool.add(block.joined())
        self._reserve(mapped)
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
            block = ahead.cut(start - ahead.address)
            block.pool.add(ahead)
        if end < block.address + block.size:
            block.pool.add(block.cut(end - start))
        block.is_mapped = False
        self.reserved -= block.size
        self._tell("segment_unmap", block.address, block.size, block.stream)
        block.pool.add(block.joined())

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self.settings.large_segment


def _has_space(block: Block | None, size: int) -> bool:
    found = 0
    while found < size and block is not None and not block.allocated:
        found += block.size
        block = block.next
    return found >= size
