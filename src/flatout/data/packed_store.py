"""Read a packed store, with its bytes asked for before they are needed.

`PackedStore` maps index and file shards, per process and when needed. `ask`, `advise`, `Ahead` and
`looking_ahead` ask the kernel (`posix_fadvise(WILLNEED)`); `ColdReads` does so only while reads
wait for storage. `resident_share` says how much of a store the page cache holds.
"""

import contextlib
import ctypes
import mmap
import os
import queue
import resource
import struct
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from flatout.data.format import ENTRY, INDEX, NAMES, Header, checksum, read_header, split_record
from flatout.records.errors import UserError
from flatout.records.input_files import parse_json

CAN_ADVISE = hasattr(os, "posix_fadvise")
PIECE_BYTES = 128 << 10
"""Asked for in one call. Linux silently leaves out what is beyond the device's own read-ahead
(`force_page_cache_ra` in mm/readahead.c): 128 KiB on most disks and network shares."""

Ask: TypeAlias = Callable[[Sequence[int]], int]
"""Asks for what the samples of these numbers will read; returns of how many it could."""


def ask(descriptor: int, begin: int, end: int) -> None:
    """Ask for these bytes of an open file, however many."""
    for at in range(begin - begin % mmap.PAGESIZE, end, PIECE_BYTES):
        os.posix_fadvise(descriptor, at, min(PIECE_BYTES, end - at), os.POSIX_FADV_WILLNEED)


def advise(path: str) -> bool:
    """Ask for a file's pages; False where it cannot be opened: whoever needs it will say so."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        ask(descriptor, 0, os.fstat(descriptor).st_size)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def asking_files(find_file: Callable[[int], str | None]) -> Ask:
    """Return what asks for the files of samples."""

    def ask_files(numbers: Sequence[int]) -> int:
        asked = 0
        for number in numbers:
            with contextlib.suppress(Exception):
                path = find_file(number)
                asked += bool(path and advise(path))
        return asked

    return ask_files


class Ahead:
    """A thread that asks for what samples to come will read.

    The advice starts reads that no one waits for; when a worker reads the file its pages are there.
    """

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked = 0
        threading.Thread(target=self._work, name="flatout-read-ahead", daemon=True).start()

    def want(self, numbers: Any) -> None:
        """Queue the samples of one batch."""
        self.waiting.put(numbers)

    def close(self) -> None:
        """Let the thread end."""
        self.waiting.put(None)

    def _work(self) -> None:
        while (numbers := self.waiting.get()) is not None:
            batch = numbers if isinstance(numbers, Iterable) else (numbers,)
            with contextlib.suppress(Exception):
                self.asked += self.ask([int(number) for number in batch])


def looking_ahead(
    batches: Iterator[Any], want: Callable[[Any], None], depth: int, close: Callable[[], None]
) -> Iterator[Any]:
    """Return the same batches of numbers; each is announced `depth` batches before it comes."""
    ready: deque[Any] = deque()
    try:
        for numbers in batches:
            want(numbers)
            ready.append(numbers)
            if len(ready) > depth:
                yield ready.popleft()
        while ready:
            yield ready.popleft()
    finally:
        close()


THREAD = getattr(resource, "RUSAGE_THREAD", None)
"""Linux counts the faults of one thread; elsewhere nothing is asked for."""
ASKED_BATCHES = 15
"""After a batch that waited, until one is looked at again: a sixteenth of the gain is given up."""


class ColdReads:
    """Asks for what a batch needs, as long as batches that are not asked for wait for storage.

    A mapped file is read page by page as it is touched: one request after the other, each of the
    size that the kernel guesses. Asked for together, the records of a batch come in requests of
    their own size, many under way at a time. In the page cache asking costs a tenth of reading and
    more: so one batch in a while is not asked for, and its page faults say how it is.
    """

    def __init__(self) -> None:
        self.left = 0
        """Batches to ask for until one is looked at."""

    @contextmanager
    def asked_for(self, places: Any, will_need: Callable[[Any], None]) -> Iterator[None]:
        """Read the records of a batch inside; `will_need` asks for them."""
        if THREAD is None:
            yield
        elif self.left > 0:
            self.left -= 1
            will_need(places)
            yield
        else:
            before = resource.getrusage(THREAD).ru_majflt
            yield
            if resource.getrusage(THREAD).ru_majflt > before:
                self.left = ASKED_BATCHES


PROBE_BYTES = 1 << 22
"""Looked at in one place."""
MAX_PROBES = 256
"""Places looked at in all: a share within a few percent, in milliseconds, whatever the size."""


def resident_share(paths: Sequence[Path]) -> float | None:
    """Return the share of the files' pages that are in memory; None where it is unknown.

    Reads of what is there are not cold.
    """
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


Places = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MAX_MAPPED_BYTES = 64 << 20
"""Of a store's files, counted as this process's memory: mapping a record's pages again takes a
hundredth of the time that cropping it takes."""
MAX_OPENED = 64
"""File shards of a store that are kept open, to ask for what is in them."""
MAX_GAP_BYTES = 1 << 16
"""Records that lie closer are asked for in one read: skipping so little costs more than reading."""


class PackedStore:
    """The records of a store by their place in stored order.

    Can be sent to other processes: each maps the files for itself.

    With `is_checked` the bytes of a record are held against its checksum before they are read for
    the first time in a process.

    Raises:
        UserError: if there is no complete store in the folder.
    """

    def __init__(self, folder: Path, *, is_checked: bool = False) -> None:
        self.folder = folder.resolve()
        self.header: Header = read_header(self.folder)
        self.is_checked = is_checked
        self._begin_counting()
        self._check_sizes()

    def _begin_counting(self) -> None:
        self._lock = threading.Lock()
        self._seen: set[int] = set()
        self._read_bytes = 0
        self.let_go_count = 0
        """How often old pages were let go."""
        self.cold_reads = ColdReads()
        """Whether batches wait for storage."""
        self.passed = np.zeros(self.header.samples if self.is_checked else 0, dtype=bool)
        """Whether each record was found as it was packed; of a store that is checked."""

    def __len__(self) -> int:
        return self.header.samples

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "header": self.header, "is_checked": self.is_checked}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin_counting()

    def _check_sizes(self) -> None:
        for shard in self.header.shards:
            path = self.folder / shard.name
            _check_size(path, path.stat().st_size if path.is_file() else -1, shard.bytes)

    @cached_property
    def index(self) -> np.ndarray[Any, np.dtype[Any]]:
        """One row per sample, in stored order."""
        path = self.folder / INDEX
        try:
            index: np.ndarray[Any, np.dtype[Any]] = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception as error:  # noqa: BLE001  a damaged header raises nearly every class
            raise UserError(f"{path} is damaged: {error}; pack again") from None
        if index.dtype != ENTRY or index.shape != (self.header.samples,):
            raise UserError(f"{path} does not belong to its header; pack again")
        return index

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The samples' names in stored order; empty where the source had none."""
        path = self.folder / NAMES
        if not path.is_file():
            return ()
        try:
            with path.open(encoding="utf-8") as file:
                return tuple(str(parse_json(line)) for line in file)
        except (OSError, ValueError) as error:
            raise UserError(f"{path} is damaged: {error}; pack again") from None

    @cached_property
    def by_original(self) -> Places:
        """The places in the order that the source had."""
        places: Places = np.argsort(self.index["original"], kind="stable")
        return places

    @cached_property
    def _maps(self) -> list[memoryview]:
        maps = []
        for shard in self.header.shards:
            maps.append(map_file(self.folder / shard.name))
            # Compiled loops read without asking: it may have been cut off since it was opened.
            _check_size(self.folder / shard.name, len(maps[-1]), shard.bytes)
        return maps

    @cached_property
    def arrays(self) -> list[Bytes]:
        """The bytes of each file shard, where they lie; they cannot be written."""
        return [np.frombuffer(whole, np.uint8) for whole in self._maps]

    def spans(self, places: Sequence[int] | Places) -> tuple[Places, Places, Places]:
        """Return shard, begin and end of many records."""
        wanted = np.asarray(places, dtype=np.int64)
        shards, begins, ends = self._rows
        return shards[wanted], begins[wanted], ends[wanted]

    def was_read(self, places: Sequence[int] | Places) -> None:
        """Count what was read, and let go of old pages now and then.

        They stay in the page cache; this process's share of it stays below `MAX_MAPPED_BYTES`.
        """
        shards, begins, ends = self.spans(places)
        with self._lock:
            self._seen.update(shards.tolist())
            self._read_bytes += int((ends - begins).sum())
            if self._read_bytes < MAX_MAPPED_BYTES:
                return
            seen, self._seen, self._read_bytes = self._seen, set(), 0
            self.let_go_count += 1
        for shard in seen:
            whole = self.arrays[shard]
            if whole.size and hasattr(mmap, "MADV_DONTNEED"):
                address = ctypes.c_void_p(whole.ctypes.data)
                _libc().madvise(address, ctypes.c_size_t(whole.size), mmap.MADV_DONTNEED)

    @cached_property
    def _rows(self) -> tuple[Places, Places, Places]:
        """Shard, begin and end of each record, as columns: a row of the index is slow to take."""
        index = self.index
        _check_places(index, self.header, self.folder / INDEX)
        begin = index["offset"].astype(np.int64)
        return index["shard"].astype(np.int64), begin, begin + index["length"].astype(np.int64)

    def record(self, place: int) -> memoryview:
        """Return the bytes of a record, without copying them."""
        shards, begins, ends = self._rows
        view: memoryview = self._maps[shards[place]]
        return view[begins[place] : ends[place]]

    def parts(self, place: int) -> list[memoryview]:
        """Return the payloads of a record's fields."""
        check_records(self, (place,))
        record = self.record(place)
        try:
            return split_record(record, len(self.header.fields))
        except ValueError:
            raise UserError(_damage(self, place)) from None

    def payload_at(self, shard: int, begin: int, fields: int, number: int) -> int:
        """Return where a field's payload begins, in the file shard."""
        lengths: tuple[int, ...] = struct.unpack_from(f"<{number}I", self._maps[shard], begin)
        return begin + 4 * fields + sum(lengths)

    def bytes_at(self, shard: int, at: int, count: int) -> memoryview:
        """Return bytes of a file shard, without copying them."""
        return self._maps[shard][at : at + count]

    def labels(self) -> Places | None:
        """Return the label of every sample in stored order, None for a store without."""
        if not self.header.label:
            return None
        labels: Places = np.asarray(self.index["label"])
        return labels

    def will_need(self, places: Sequence[int] | Places) -> None:
        """Let the kernel read records ahead, neighbours in one go, and go on."""
        if not CAN_ADVISE or not len(places):
            return
        for shard, begin, end in self._runs(np.sort(np.asarray(places))):
            opened = self._opened(shard)  # held: another thread's may take its place meanwhile
            ask(opened.number, begin, end)

    def _runs(self, places: Places) -> list[tuple[int, int, int]]:
        """Return shard, begin and end of stretches that lie together."""
        shards, begins, ends = (column[places] for column in self._rows)
        is_new = np.ones(len(places), dtype=bool)
        is_new[1:] = (shards[1:] != shards[:-1]) | (begins[1:] - ends[:-1] > MAX_GAP_BYTES)
        firsts = np.flatnonzero(is_new)
        lasts = np.append(firsts[1:], len(places)) - 1
        found = zip(shards[firsts], begins[firsts], ends[lasts], strict=True)
        return [(int(shard), int(begin), int(end)) for shard, begin, end in found]

    @cached_property
    def _opened(self) -> Callable[[int], "_Opened"]:
        paths = [self.folder / shard.name for shard in self.header.shards]
        return lru_cache(MAX_OPENED)(lambda shard: _Opened(paths[shard]))


def _check_size(path: Path, size: int, wanted: int) -> None:
    if size != wanted:
        found = "is gone" if size < 0 else f"has {size} bytes instead of {wanted}"
        raise UserError(f"{path} {found}; pack again into an empty folder")


def _check_places(index: Any, header: Header, path: Path) -> None:
    """Make sure that every record is inside its file shard: compiled loops read without asking."""
    sizes = np.array([shard.bytes for shard in header.shards], dtype=np.uint64)
    shards = index["shard"]
    if len(index) and shards.max() < len(sizes):
        rooms = sizes[shards]
        if (index["length"] <= rooms).all() and (index["offset"] <= rooms - index["length"]).all():
            return
    if len(index):
        raise UserError(f"{path} is damaged: a record is outside its file shard; pack again")


def check_records(store: PackedStore, places: Sequence[int] | Places) -> None:
    """Hold records that this process did not read yet against their checksums, if asked for."""
    if not store.is_checked:
        return
    wanted = np.asarray(places, dtype=np.int64)
    for place in wanted[~store.passed[wanted]].tolist():
        if checksum(store.record(place)) != store.index["check"][place]:
            raise UserError(_damage(store, place))
        store.passed[place] = True


def _damage(store: PackedStore, place: int) -> str:
    row, shards = store.index[place], store.header.shards
    name = f" ({store.names[place]})" if place < len(store.names) else ""
    return (
        f"sample {place} of {store.folder}{name} is damaged: the bytes in "
        f"{shards[row['shard']].name} are not those that were packed; copy the store again, or "
        "pack it again into an empty folder"
    )


def map_file(path: Path) -> memoryview:
    """Return the bytes of a file where the page cache has them; they cannot be written.

    Python's own `mmap` keeps a descriptor for each file, of which a process may often have no more
    than 1,024. This one goes with the last view of it.
    """
    libc = _libc()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if not size:
            return memoryview(b"")
        at = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if at == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    whole = (ctypes.c_ubyte * size).from_address(at)
    weakref.finalize(whole, libc.munmap, at, size).atexit = False
    return memoryview(whole).cast("B").toreadonly()


@lru_cache(1)
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    numbers = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_ssize_t)
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *numbers)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    return libc


class _Opened:
    """A file descriptor that is closed with the last reference."""

    def __init__(self, path: Path) -> None:
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if hasattr(self, "number"):  # else the file could not be opened
            os.close(self.number)
