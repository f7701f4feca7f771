"""What a test leaves on the machine, told apart from what others do there at the same time."""

import contextlib
import os
import time
from pathlib import Path

import psutil

SHM = Path("/dev/shm")


def left_behind():
    """Return the processes below this one, and our shared memory that nobody uses."""
    below = psutil.Process().children(recursive=True)
    return {process.pid for process in below} | unused_memory()


def left_since(before, limit_s=20.0):
    """Return what is left beyond what was there before, once it had time to go."""
    ends_at = time.monotonic() + limit_s
    while (left := left_behind() - before) and time.monotonic() < ends_at:
        time.sleep(0.1)
    return left


def unused_memory():
    """Return the names of this user's shared memory that no living process has mapped."""
    names = set()
    for path in SHM.iterdir():
        with contextlib.suppress(OSError):  # gone meanwhile
            if path.stat().st_uid == os.getuid():
                names.add(path.name)
    mapped = _mappings() if names else ""
    return {name for name in names if name not in mapped}


def _mappings():
    texts = []
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            texts.append(path.read_text())
    return "".join(texts)
