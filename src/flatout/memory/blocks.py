"""Blocks of the simulated device memory, and the pools that hold the free ones."""

from bisect import bisect_left, insort
from collections.abc import Iterator


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
        """Take in address space that no memory stands behind."""
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
