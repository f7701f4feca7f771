"""Which pages of a file lie in memory, asked of the kernel."""

import ctypes
import mmap
import time

from flatout.data.packed_store import evict as evict


def cached_pages(path):
    """Return how many pages of a file are in the page cache."""
    return sum(_flags(path))


def cached_share(path, begin, end):
    """Return the share of the pages of these bytes that are in the page cache."""
    flags = _flags(path)[begin // mmap.PAGESIZE : -(-end // mmap.PAGESIZE)]
    return sum(flags) / len(flags)


def wait_for(condition):
    """Return whether something becomes true within four seconds: the kernel reads when it likes."""
    for _ in range(200):
        if condition():
            return True
        time.sleep(0.02)
    return False


def _flags(path):
    """Return of each page whether it is in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        asked = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(place), ctypes.c_size_t(len(memory)), flags
        )
        assert asked == 0
        return [flag & 1 for flag in flags]
