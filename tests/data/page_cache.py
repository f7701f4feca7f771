"""Which pages of a file lie in memory, asked of the kernel."""

import ctypes
import mmap
import os


def evict(path):
    """Drop a file's pages from the page cache; they must be on the disk first."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached_pages(path):
    """Return how many pages of a file are in the page cache."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        pages = -(-len(memory) // mmap.PAGESIZE)
        flags = (ctypes.c_ubyte * pages)()
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        asked = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(place), ctypes.c_size_t(len(memory)), flags
        )
        assert asked == 0
        return sum(flag & 1 for flag in flags)
