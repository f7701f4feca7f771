"""A store of byte strings by number, shared by forked processes and gone with the last of them.

It lies in anonymous memory: a file without a name, so that nothing is left behind however its
processes end, kill -9 included, and neither /dev/shm nor a disk has to have room. Nothing is ever
evicted: what fits stays, the rest is made anew each time.
"""

import fcntl
import mmap
import os
import struct
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from flatout.core.errors import NotApplicable

HEADER = struct.Struct("<QQ")
"""The first free byte of the payload, and the number of entries."""
ENTRY = struct.Struct("<QQQ")
"""Key, offset, length. A key of 0 is a free slot; the key is written last."""
MAX_PROBES = 16
"""Slots that are looked at for a key; a table at half load needs two on average."""
ALIGNMENT = 64
KEY = struct.Struct("<Q")
DESCRIPTORS = Path("/proc/self/fd")
"""Where Linux shows a process's open files, those without a name too; macOS has no such place."""


class Store:
    """Byte strings by key, a number from 1 to 2**64 - 1."""

    def __init__(self, *, slots: int, budget_bytes: int) -> None:
        if slots < 1 or budget_bytes < 1:
            raise ValueError(f"slots={slots} and budget_bytes={budget_bytes} must be at least 1")
        self.slots = slots
        self.start = _aligned(HEADER.size + slots * ENTRY.size)
        self.size = _aligned(self.start + budget_bytes)
        self._open(anonymous_file())
        os.ftruncate(self.descriptor, self.size)
        self._map()
        if not HEADER.unpack_from(self.memory)[0]:
            HEADER.pack_into(self.memory, 0, self.start, 0)

    def _open(self, descriptor: int) -> None:
        self.descriptor = descriptor
        weakref.finalize(self, os.close, descriptor).atexit = False
        self._renew_lock()
        # What is registered stays for ever: it must not keep the store, and so its memory.
        os.register_at_fork(after_in_child=partial(_renew_lock, weakref.ref(self)))

    def _map(self) -> None:
        self.memory = mmap.mmap(self.descriptor, self.size)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, int]:
        """Return how a spawned process finds the memory: through this process, while it lives.

        Raises:
            NotApplicable: if the system has no way to find it.
        """
        if not can_be_sent():
            raise NotApplicable(NO_WAY)
        return {
            "pid": os.getpid(),
            "descriptor": self.descriptor,
            "slots": self.slots,
            "start": self.start,
            "size": self.size,
        }

    def __setstate__(self, state: dict[str, int]) -> None:
        self.slots, self.start, self.size = (state[k] for k in ("slots", "start", "size"))
        self._open(os.open(f"/proc/{state['pid']}/fd/{state['descriptor']}", os.O_RDWR))
        self._map()

    @property
    def count(self) -> int:
        """How many entries there are."""
        return int(HEADER.unpack_from(self.memory)[1])

    @property
    def used_bytes(self) -> int:
        """Bytes of the payload so far."""
        return int(HEADER.unpack_from(self.memory)[0]) - self.start

    def find(self, key: int) -> memoryview | None:
        """Return the bytes under a key, None where there are none. The view is read-only."""
        for place in self._places(key):
            found, offset, length = ENTRY.unpack_from(self.memory, place)
            if found == key:
                return memoryview(self.memory)[offset : offset + length].toreadonly()
            if found == 0:
                return None
        return None

    def add(self, key: int, parts: Sequence[bytes | memoryview]) -> bool:
        """Store the parts, joined, under a key; False where no room is left for them.

        A key that is there already stays as it is.
        """
        length = sum(len(part) for part in parts)
        with self._locked():
            place = self._free_place(key)
            if place is None:
                return False
            if ENTRY.unpack_from(self.memory, place)[0] == key:
                return True
            offset, count = HEADER.unpack_from(self.memory)
            if offset + length > self.size:
                return False
            self._write(offset, parts)
            ENTRY.pack_into(self.memory, place, 0, offset, length)
            HEADER.pack_into(self.memory, 0, _aligned(offset + length), count + 1)
            # Readers take no lock: they may see the entry only once all of it is there.
            KEY.pack_into(self.memory, place, key)
        return True

    def _write(self, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        for part in parts:
            end = offset + len(part)
            self.memory[offset:end] = part
            offset = end

    def _places(self, key: int) -> Iterator[int]:
        for probe in range(min(MAX_PROBES, self.slots)):
            yield HEADER.size + (key + probe) % self.slots * ENTRY.size

    def _free_place(self, key: int) -> int | None:
        known = ((place, ENTRY.unpack_from(self.memory, place)[0]) for place in self._places(key))
        return next((place for place, found in known if found in (0, key)), None)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep other threads out, and other processes: the kernel lets go when one is killed."""
        with self._lock:
            fcntl.lockf(self.descriptor, fcntl.LOCK_EX, 1)
            try:
                yield
            finally:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN, 1)


def _renew_lock(reference: "weakref.ref[Store]") -> None:
    store = reference()
    if store is not None:
        store._renew_lock()


def can_be_sent() -> bool:
    """Tell whether a process that was spawned, and not forked, can find the memory."""
    return DESCRIPTORS.exists()


NO_WAY = (
    f"spawned workers find the kept samples through {DESCRIPTORS}, which this system does not have"
)


def anonymous_file() -> int:
    """Return the descriptor of a file without a name, in memory where the system has such."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("flatout-store")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
