"""How much of a store the page cache holds: reads of what is there are not cold."""

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

PROBE_BYTES = 1 << 22
"""Looked at in one place."""
MAX_PROBES = 256
"""Places looked at in all: a share within a few percent, in milliseconds, whatever the size."""


def resident_share(paths: Sequence[Path]) -> float | None:
    """Return the share of the files' pages that are in memory; None where it cannot be told."""
    sizes = [path.stat().st_size for path in paths]
    total = sum(sizes)
    if not sys.platform.startswith("linux") or not total:
        return None
    wanted = max(1, total // MAX_PROBES)
    seen = resident = 0
    for path, size in zip(paths, sizes, strict=True):
        found = _resident_pages(path, size, max(PROBE_BYTES, wanted)) if size else None
        if found is not None:
            resident, seen = resident + found[0], seen + found[1]
    return resident / seen if seen else None


def _resident_pages(path: Path, size: int, stride: int) -> tuple[int, int] | None:
    """Return pages in memory and pages looked at: the first part of every stride."""
    mincore = getattr(ctypes.CDLL(None, use_errno=True), "mincore", None)
    if mincore is None:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as view:
        whole = np.frombuffer(view, np.uint8)
        address = whole.ctypes.data
        resident = seen = 0
        for start in range(0, size, stride):
            length = min(PROBE_BYTES, size - start)
            pages = -(-length // mmap.PAGESIZE)
            flags = (ctypes.c_ubyte * pages)()
            start -= start % mmap.PAGESIZE
            arguments = ctypes.c_void_p(address + start), ctypes.c_size_t(length), flags
            if mincore(*arguments):
                del whole
                return None
            resident += int((np.frombuffer(bytes(flags), np.uint8) & 1).sum())
            seen += pages
        del whole
    return resident, seen


def evict(path: Path) -> None:
    """Let the kernel forget a file's clean pages, so that the next reads are cold."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
