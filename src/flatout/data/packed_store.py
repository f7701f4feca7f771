"""A packed store, open for reading: index and file shards mapped, per process and when needed."""

import mmap
import os
import struct
import threading
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from flatout.core.errors import UserError
from flatout.core.input_files import parse_json
from flatout.data import ahead
from flatout.data.cold import ColdReads
from flatout.data.format import (
    ENTRY,
    INDEX,
    NAMES,
    Header,
    checksum,
    read_header,
    split_record,
)

Places = np.ndarray[Any, np.dtype[np.int64]]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
MAX_MAPPED_BYTES = 64 << 20
"""Of a store's files, counted as this process's memory: mapping a record's pages anew takes a
hundredth of the time that cropping it takes."""
MAX_GAP_BYTES = 1 << 16
"""Records that lie closer are asked for in one read: skipping so little costs more than reading."""


class Store:
    """The records of a store by their place in stored order.

    Can be sent to other processes: each maps the files for itself.

    Args:
        folder: of the store.
        is_checked: whether a record's bytes are held against its checksum before they are read for
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
            size = path.stat().st_size if path.is_file() else -1
            if size != shard.bytes:
                found = "is gone" if size < 0 else f"has {size} bytes instead of {shard.bytes}"
                raise UserError(f"{path} {found}; pack again into an empty folder")

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
    def _mapped(self) -> list[mmap.mmap | bytes]:
        return [_mapped(self.folder / shard.name, shard.bytes) for shard in self.header.shards]

    @cached_property
    def _maps(self) -> list[memoryview]:
        return [memoryview(whole) for whole in self._mapped]

    @cached_property
    def arrays(self) -> list[Bytes]:
        """The bytes of each file shard, where they lie; they cannot be written."""
        return [np.frombuffer(whole, np.uint8) for whole in self._mapped]

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
            whole = self._mapped[shard]
            if isinstance(whole, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                whole.madvise(mmap.MADV_DONTNEED)

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
        if not ahead.CAN_ADVISE or not len(places):
            return
        for shard, begin, end in self._runs(np.sort(np.asarray(places))):
            ahead.ask(self._descriptors[shard], begin, end)

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
    def _descriptors(self) -> list[int]:
        opened = _Opened([self.folder / shard.name for shard in self.header.shards])
        self._keep = opened
        return opened.numbers


def _check_places(index: Any, header: Header, path: Path) -> None:
    """Make sure that every record is inside its file shard: compiled loops read without asking.

    Raises:
        UserError: if one is not.
    """
    sizes = np.array([shard.bytes for shard in header.shards], dtype=np.uint64)
    shards = index["shard"]
    if len(index) and shards.max() < len(sizes):
        rooms = sizes[shards]
        if (index["length"] <= rooms).all() and (index["offset"] <= rooms - index["length"]).all():
            return
    if len(index):
        raise UserError(f"{path} is damaged: a record is outside its file shard; pack again")


def check_records(store: Store, places: Sequence[int] | Places) -> None:
    """Hold records that this process did not read yet against their checksums, if asked for.

    Raises:
        UserError: if the bytes of one are others than those that were packed.
    """
    if not store.is_checked:
        return
    wanted = np.asarray(places, dtype=np.int64)
    for place in wanted[~store.passed[wanted]].tolist():
        if checksum(store.record(place)) != store.index["check"][place]:
            raise UserError(_damage(store, place))
        store.passed[place] = True


def _damage(store: Store, place: int) -> str:
    row, shards = store.index[place], store.header.shards
    name = f" ({store.names[place]})" if place < len(store.names) else ""
    return (
        f"sample {place} of {store.folder}{name} is damaged: the bytes in "
        f"{shards[row['shard']].name} are not those that were packed; copy the store again, or "
        "pack it again into an empty folder"
    )


def _mapped(path: Path, size: int) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else b""


class _Opened:
    """File descriptors that are closed with the last reference."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.numbers = [os.open(path, os.O_RDONLY | os.O_CLOEXEC) for path in paths]

    def __del__(self) -> None:
        for number in self.numbers:
            os.close(number)
