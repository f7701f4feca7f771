"""Keep the samples of a script's data set in memory, so that each is made once.

`cached` puts a store in front of `__getitem__`; `ByteStore` is that store, shared by the loader's
forked workers. `free_memory_bytes` says how large it may get, and `fill` makes samples ahead.
"""

import fcntl
import mmap
import operator
import os
import struct
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from flatout.data.proof.changes import ChangeWatch
from flatout.data.proof.dataset_facts import stand_in
from flatout.data.proof.forked import in_forks
from flatout.data.values import decode, encode
from flatout.hardware.limits import ROOT, cgroup_folders, read_text, usable_cores
from flatout.records.errors import NotApplicable

RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""How many ranks of one training share this host; set by torchrun."""


def local_ranks(environment: Mapping[str, str] | None = None) -> int:
    """Return how many ranks of this training share the host, at least 1.

    >>> local_ranks({"LOCAL_WORLD_SIZE": "4"}), local_ranks({})
    (4, 1)
    """
    text = (os.environ if environment is None else environment).get(RANKS_VARIABLE, "")
    return max(1, int(text)) if text.isdigit() else 1


def processes_here() -> int:
    """Return how many processes this rank may keep busy: its part of the host's cores."""
    return max(1, usable_cores() // local_ranks())


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return what could be allocated now without swapping, on the host and in every group above.

    Page cache counts as free: the kernel gives it back.

    The groups are those of this process's container, in which its siblings count, too.
    """
    return max(0, min([_host_available(root), *_group_rooms(root)]))


def _host_available(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    import psutil

    return int(psutil.virtual_memory().available)  # macOS has no such file


def _group_rooms(root: Path) -> list[int]:
    rooms = []
    for folder in cgroup_folders("memory", root):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes")
        # Version 1 writes a number near 2**63 for "no limit".
        if limit is not None and used is not None and limit < 2**60:
            rooms.append(limit - used + _reclaimable(folder))
    return rooms


def _first_number(folder: Path, *names: str) -> int | None:
    texts = (read_text(folder / name) for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)


def _reclaimable(folder: Path) -> int:
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


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


class ByteStore:
    """Byte strings by key, a number from 1 to 2**64 - 1.

    Forked processes share it, and it is gone with the last of them. It is in anonymous memory: a
    file without a name, so that nothing is left behind however its processes end, kill -9 included,
    and neither /dev/shm nor a disk has to have room. Nothing is ever evicted: what fits stays, the
    rest is made again each time.
    """

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
        """Return how a spawned process finds the memory: through this process, while it lives."""
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


def _renew_lock(reference: "weakref.ref[ByteStore]") -> None:
    store = reference()
    if store is not None:
        store._renew_lock()


def can_be_sent() -> bool:
    """Return whether a process that was spawned, and not forked, can find the memory."""
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


STORE = "_flatout_store"
SOURCE = "_flatout_source"
WATCH = "_flatout_watch"


def cached(dataset: Any, store: ByteStore, watch: ChangeWatch | None = None) -> Any:
    """Return a data set that keeps its samples in the store, else the same.

    The result is of a class derived from the data set's own and shares its attributes, so that a
    script which asks `loader.dataset` anything finds what it knows. Once the script changes the
    data set, the store is left alone and the samples are the data set's own.

    Raises:
        NotApplicable: if an object of its class cannot be made to share its attributes.
    """
    watch = watch or ChangeWatch(dataset)
    members = {
        STORE: store,
        SOURCE: dataset,
        WATCH: watch,
        "__getitem__": _get,
        "__getitems__": _get_many,
    }
    return stand_in(dataset, members, (cached, (dataset, store, watch)))


def is_cached(dataset: Any) -> bool:
    """Return whether a data set came from `cached`."""
    return hasattr(type(dataset), STORE)


def store_of(dataset: Any) -> ByteStore:
    """Return the store of a data set that came from `cached`."""
    store: ByteStore = getattr(type(dataset), STORE)
    return store


def source_of(dataset: Any) -> Any:
    """Return the script's data set behind one that came from `cached`."""
    return getattr(type(dataset), SOURCE)


def watch_of(dataset: Any) -> ChangeWatch:
    """Return what says whether the script changed a data set that came from `cached`."""
    watch: ChangeWatch = getattr(type(dataset), WATCH)
    return watch


def _get(self: Any, index: Any) -> Any:
    if watch_of(self).is_changed():
        return source_of(self)[index]
    with _reading(self):
        return kept_or_made(self, index)


def kept_or_made(dataset: Any, index: Any) -> Any:
    """Return a sample of a data set that came from `cached`, whoever may have changed it."""
    store, source = store_of(dataset), source_of(dataset)
    key = key_of(index, source)
    found = store.find(key) if key is not None else None
    if found is not None:
        return decode(found)
    streams = _streams()
    sample = source[index]
    # A few samples were looked at: another one may be augmented, as those of a rare class.
    if key is not None and not streams.are_moved():
        store.add(key, encode(sample))
    return sample


def _streams() -> Any:
    from flatout.data.proof.random_streams import Streams

    return Streams()


def _reading(self: Any) -> AbstractContextManager[None]:
    """Let changes of the data set count as ours, unless every sample is in the store."""
    is_whole = store_of(self).count >= len(source_of(self))
    return nullcontext() if is_whole else watch_of(self).reading()


def _get_many(self: Any, indices: Any) -> list[Any]:
    source = source_of(self)
    has_batches = hasattr(type(source), "__getitems__")
    if watch_of(self).is_changed():
        return source.__getitems__(indices) if has_batches else [source[i] for i in indices]
    if not has_batches:
        with _reading(self):
            return [kept_or_made(self, index) for index in indices]
    store = store_of(self)
    keys = [key_of(index, source) for index in indices]
    found = [store.find(key) if key is not None else None for key in keys]
    missing = [index for index, view in zip(indices, found, strict=True) if view is None]
    streams = _streams() if missing else None
    made = iter(_made(self, missing) if missing else ())
    can_keep = streams is not None and not streams.are_moved()
    samples = []
    for key, view in zip(keys, found, strict=True):
        sample = next(made) if view is None else decode(view)
        if view is None and key is not None and can_keep:
            store.add(key, encode(sample))
        samples.append(sample)
    return samples


def _made(self: Any, indices: list[Any]) -> list[Any]:
    with watch_of(self).reading():
        return list(source_of(self).__getitems__(indices))


def key_of(index: Any, dataset: Any) -> int | None:
    """Return the store's key of a sample, None for an index that is no number or before the first.

    >>> key_of(0, "abc"), key_of(-1, "abc"), key_of("a", "abc"), key_of(True, "abc")
    (1, 3, None, None)
    >>> key_of(-3, "abc"), key_of(-4, "abc")
    (1, None)
    """
    if isinstance(index, bool):
        return None
    try:
        number = operator.index(index)
    except TypeError:
        return None
    place = number if number >= 0 else number + len(dataset)
    return 1 + place if place >= 0 else None  # a key of 0 marks a free slot


def fill(make: Callable[[int], Any], count: int, *, processes: int, limit_s: float) -> None:
    """Call `make` for the indices below `count` in forked processes for at most so long."""

    def part(first: int) -> Callable[[], None]:
        def work() -> None:
            ends_at = time.monotonic() + limit_s
            for index in range(first, count, processes):
                if time.monotonic() > ends_at:
                    break
                make(index)

        return work

    in_forks([part(first) for first in range(processes)], 1.5 * limit_s + 5.0)
