"""`flatout.data.open`: a packed store as a plain map-style data set, and its batches.

`open_packed` makes a `PackedDataset`. `find_layout` and `gather` copy many samples of one shape out
of the file shards at once; `Leases` is memory for batches that is used again; `BatchThreads` makes
batches in threads of the training process.
"""

import functools
import math
import operator
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, default_collate, get_worker_info

from flatout.data import pictures, values
from flatout.data.format import Field, Header
from flatout.data.packed_store import PackedStore, Places, check_records
from flatout.data.sampler import sample_seed, seeded
from flatout.hardware.limits import usable_cores
from flatout.records.errors import UserError

MAX_KEPT = 8
"""Blocks that wait to be used again: more than a loader has under way in a few threads."""
ALIGNMENT = 64


class Leases:
    """Blocks of memory, lent as tensors; a block comes back with the last view of its tensor.

    A batch of 64 normalised photographs has 38.5 MB: fresh memory of that size is given back to the
    system with each batch and zeroed with the next, which costs as much as filling it.
    """

    def __init__(self) -> None:
        self._free: list[Any] = []
        self._renew_lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()  # a block may come back while this thread looks for one

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose content is not set."""
        count = math.prod(shape) * dtype.itemsize
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        block = self._find(count)
        # This view lives as long as the tensor's storage, so as long as any view of the tensor.
        lent = block[:count]
        weakref.finalize(lent, self._give_back, block).atexit = False
        return torch.from_numpy(lent).view(dtype).view(tuple(shape))

    def _find(self, count: int) -> Any:
        with self._lock:
            for number, block in enumerate(self._free):
                if count <= block.nbytes < 2 * count + ALIGNMENT:
                    return self._free.pop(number)
        # Numpy's memory, because it asks for huge pages.
        return np.empty(-(-count // ALIGNMENT) * ALIGNMENT, np.uint8)

    def _give_back(self, block: Any) -> None:
        with self._lock:
            self._free.append(block)
            del self._free[:-MAX_KEPT]


SCALAR_TYPES = {"int": "<i8", "float": "<f8", "bool": "?"}
"""How a number is stored."""
SMALL_ROW_BYTES = 4096
"""Below, picking rows twice (out of the file shard, into the batch) is quicker than a call each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLayout:
    """Where the fields are in each record of a store."""

    record_bytes: int
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each field's value."""


def find_layout(store: PackedStore) -> BatchLayout | None:
    """Return the layout that all records of a store have; None where they differ."""
    fields = store.header.fields
    if not len(store) or not all(is_plain(field) for field in fields):
        return None
    _, begins, ends = store.spans(np.arange(len(store)))
    size = int(ends[0] - begins[0])
    spans = _spans(fields)
    if spans[-1][1] != size or (ends - begins != size).any() or (begins % size).any():
        return None
    return BatchLayout(record_bytes=size, spans=spans)


def is_plain(field: Field) -> bool:
    """Return whether a field's value has the same number of bytes in every sample, uncoded."""
    if field.kind in SCALAR_TYPES:
        return True
    return field.kind in ("array", "image") and field.shape is not None


def _spans(fields: Sequence[Field]) -> tuple[tuple[int, int], ...]:
    spans, at = [], 4 * len(fields)
    for field in fields:
        begin = at + _head_bytes(field)
        at = begin + int(np.prod(field.shape or (), dtype=np.int64)) * dtype_of(field).itemsize
        spans.append((begin, at))
    return tuple(spans)


def _head_bytes(field: Field) -> int:
    if field.kind == "image":
        return 1 + pictures.SIZE.size
    return 1 + 4 * len(field.shape or ()) if field.kind == "array" else 0


def dtype_of(field: Field) -> "np.dtype[Any]":
    """Return the type of a plain field's numbers."""
    if field.kind in SCALAR_TYPES:
        return np.dtype(SCALAR_TYPES[field.kind])
    return np.dtype(np.uint8 if field.kind == "image" else field.dtype)


def gather(store: PackedStore, layout: BatchLayout, places: Places, targets: Sequence[Any]) -> None:
    """Copy the fields of these samples, one row each, into a contiguous array for each field.

    Where all records of a store are equally long and laid out alike, a field of a sample is a row
    of a matrix that the file already is: a batch is rows picked by number, without a call for each
    sample.
    """
    if not len(places):
        return
    check_records(store, places)
    shards, begins, _ = store.spans(places)
    numbers = begins // layout.record_bytes
    shape = (-1, layout.record_bytes)
    records = {shard: store.arrays[shard].reshape(shape) for shard in set(shards.tolist())}
    for (begin, end), target in zip(layout.spans, targets, strict=True):
        rows = target.reshape(len(places), -1).view(np.uint8)
        parts = {shard: whole[:, begin:end] for shard, whole in records.items()}
        if end - begin <= SMALL_ROW_BYTES:
            for shard, part in parts.items():
                those = np.flatnonzero(shards == shard)
                rows[those] = part[numbers[those]]
        else:
            pairs = zip(shards.tolist(), numbers.tolist(), strict=True)
            for row, (shard, number) in enumerate(pairs):
                rows[row] = parts[shard][number]


DECODERS = ("tensor", "numpy", "view", "pil", "bytes")
ORDERS = ("stored", "source")
SCALARS = {"int": torch.int64, "float": torch.float64, "bool": torch.bool}
LEASES = Leases()
"""Memory of the batches that are made in this process."""
Decode = str | Callable[[bytes], Any]


class PackedDataset(Dataset[Any]):
    """The samples of a packed store, in the structure that the source had."""

    def __init__(
        self,
        store: PackedStore,
        *,
        decode: Decode = "",
        transform: Callable[[Any], Any] | None = None,
        order: str = "stored",
        seed: int | None = None,
    ) -> None:
        if order not in ORDERS:
            raise UserError(f"order={order!r} is not allowed; give one of {', '.join(ORDERS)}")
        if not callable(decode) and decode not in ("", *DECODERS):
            raise UserError(
                f"decode={decode!r} is not allowed; give one of {', '.join(DECODERS)}, or a "
                "function of the stored bytes"
            )
        self.store = store
        self.decode = decode
        self.transform = transform
        self.order = order
        self.seed = seed
        self._names = tuple(field.name for field in store.header.fields)

    @property
    def header(self) -> Header:
        """What the store holds."""
        return self.store.header

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, where the source had some."""
        return self.header.classes

    @property
    def targets(self) -> list[int]:
        """The label of every sample."""
        labels = self.store.labels()
        if labels is None:
            raise UserError("the store has no label")
        return [int(label) for label in (labels[self.places] if self.is_reordered else labels)]

    @property
    def is_reordered(self) -> bool:
        """Whether samples are numbered as in the source, not as they are stored."""
        return self.order == "source"

    @property
    def places(self) -> Places:
        """The place of each sample in stored order."""
        return self.store.by_original if self.is_reordered else np.arange(len(self))

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, index: int) -> Any:
        place = self._place(index)
        parts = self.store.parts(place)
        fields = self.header.fields
        found = [self._value(field, part) for field, part in zip(fields, parts, strict=True)]
        if self.transform is not None:
            return self._transformed(found, place, getattr(index, "epoch", 0))
        return values.build(self.header.structure, self._names, found)

    def __getitems__(self, indices: Sequence[int]) -> Sequence[Any]:
        places = self.places_of(indices)
        with self.store.cold_reads.asked_for(places, self.store.will_need):
            return self._batch(indices, places)

    def _batch(self, indices: Sequence[int], places: Places) -> Sequence[Any]:
        layout = self._layout if self.transform is None else None
        if layout is None:
            return [self[index] for index in indices]
        columns = [empty_column(field, len(places)) for field in self.header.fields]
        gather(self.store, layout, places, [column.numpy() for column in columns])
        return Stacked(columns[0]) if self._is_one_tensor else Gathered(self.header, columns)

    @property
    def _is_one_tensor(self) -> bool:
        """Whether a sample is one tensor; images are, where they are gathered."""
        first = self.header.fields[0]
        is_tensor = first.kind == "image" or first.holder == "torch"
        return self.header.structure == "single" and is_tensor

    @cached_property
    def _layout(self) -> BatchLayout | None:
        """Where the fields are in every record, if they are given as they are stored."""
        images = [field for field in self.header.fields if field.kind == "image"]
        is_given_so = self.decode in ("", "tensor") and all(
            field.holder != "pil" and field.shape is not None and field.shape[-1] == 3
            for field in images
        )
        return find_layout(self.store) if is_given_so or not images else None

    def places_of(self, indices: Sequence[int]) -> Places:
        """Return the places of samples in stored order, negative numbers from the end.

        Raises:
            IndexError: if there is no such sample.
        """
        count = len(self.store)
        wanted = np.asarray(indices, dtype=np.int64)
        outside = np.flatnonzero((wanted < -count) | (wanted >= count))
        if len(outside):
            raise IndexError(f"sample {wanted[outside[0]]} of {count}")
        wanted = wanted % max(1, count)
        return self.store.by_original[wanted] if self.is_reordered else wanted

    def _place(self, index: int) -> int:
        count = len(self.store)
        if not -count <= index < count:
            raise IndexError(f"sample {index} of {count}")
        index = int(index) % count
        return int(self.store.by_original[index]) if self.is_reordered else index

    def _value(self, field: Field, part: memoryview) -> Any:
        if field.kind != "image":
            return values.value(field, part)
        return _image(field, part, self.decode)

    def _transformed(self, found: list[Any], place: int, epoch: int) -> Any:
        if self.seed is None:
            return self._with_transform(found)
        original = int(self.store.index["original"][place])
        with seeded(sample_seed(self.seed, epoch, original)):
            return self._with_transform(found)

    def _with_transform(self, found: list[Any]) -> Any:
        """Return the sample, its first value transformed; a mapping is transformed as a whole."""
        transform = self.transform
        if transform is None:
            raise AssertionError("called without a transform")
        if self.header.structure == "dict":
            return transform(values.build("dict", self._names, found))
        return values.build(self.header.structure, self._names, [transform(found[0]), *found[1:]])


class Gathered(MutableSequence[Any]):
    """Samples of a batch that already are in one tensor per field; `collate` takes these.

    Single samples are made once one is asked for. From then on they are the batch: a collation of
    the script's may change them, sort them and leave some out.
    """

    def __init__(self, header: Header, columns: Sequence[torch.Tensor]) -> None:
        self.header = header
        self.columns = tuple(columns)
        self.names = tuple(field.name for field in header.fields)

    @cached_property
    def samples(self) -> list[Any]:
        """The samples one by one."""
        count, pairs = len(self), list(zip(self.header.fields, self.columns, strict=True))
        rows = ([_given(field, column[index]) for field, column in pairs] for index in range(count))
        return [values.build(self.header.structure, self.names, row) for row in rows]

    def __len__(self) -> int:
        return len(self.samples) if "samples" in vars(self) else len(self.columns[0])

    def __getitem__(self, index: Any) -> Any:
        return self.samples[index]

    def __setitem__(self, index: Any, sample: Any) -> None:
        self.samples[index] = sample

    def __delitem__(self, index: Any) -> None:
        del self.samples[index]

    def insert(self, index: int, value: Any) -> None:
        """Put a sample in front of another one."""
        self.samples.insert(index, value)

    def sort(self, **options: Any) -> None:
        """Sort the samples as a list does."""
        self.samples.sort(**options)

    def batch(self) -> Any:
        """Return the tensors in the structure of a sample."""
        if "samples" in vars(self):
            return default_collate(self.samples)
        pairs = zip(self.header.fields, self.columns, strict=True)
        found = [
            list(column.unbind(1)) if field.holder == "list" else column for field, column in pairs
        ]
        return values.build(self.header.structure, self.names, found)


class Stacked(list[Any]):
    """Samples that are the rows of one tensor; a list, as `torch.stack` takes no other sequence."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.rows = whole.unbind(0)
        super().__init__(self.rows)
        self.whole = whole

    def batch(self) -> Any:
        """Return the tensor; where the list was changed, what it holds now, stacked."""
        is_whole = len(self) == len(self.rows) and all(map(operator.is_, self, self.rows))
        return self.whole if is_whole else default_collate(list(self))


def collate(samples: Sequence[Any]) -> Any:
    """Return a batch as torch's `default_collate` does; one that is together is not copied."""
    if isinstance(samples, Gathered | Stacked):
        return samples.batch()
    return default_collate(list(samples))


def open_packed(
    path: str | Path,
    *,
    decode: Decode = "",
    transform: Callable[[Any], Any] | None = None,
    order: str = "stored",
    seed: int | None = None,
    check: bool = False,
) -> PackedDataset:
    """Open a packed store as a data set for any `DataLoader`.

    Args:
        path: the folder that `flatout pack` wrote.
        decode: what becomes of images: `tensor` (uint8, height x width x RGB; the default),
            `numpy` (the same), `view` (of raw pixels where they are in the file: nothing is copied,
            nothing may be written), `pil`, `bytes`, or a function of the stored file's bytes.
        transform: applied to the first value of a sample, as torchvision's data sets do; to the
            whole sample where it is a mapping.
        order: how samples are numbered: as they are `stored`, or as in the `source`.
        seed: draws what the transform draws from the global streams as a function of seed, epoch
            and sample, whatever the workers; the epoch comes with `flatout.data.GlobalOrder`.
        check: holds the bytes of a sample against its checksum when a process first reads it, and
            raises a `UserError` that names it where they differ: at every start of a worker once
            more, so give the `DataLoader` `persistent_workers=True`.

    Raises:
        UserError: if there is no complete store.
    """
    store = PackedStore(Path(path), is_checked=check)
    return PackedDataset(store, decode=decode, transform=transform, order=order, seed=seed)


def _image(field: Field, part: memoryview, decode: Decode) -> Any:
    if callable(decode):
        return decode(_file_bytes(part))
    if decode == "pil" or (not decode and field.holder == "pil"):
        return pictures.open_image(part)
    if decode == "bytes":
        return _file_bytes(part)
    array = pictures.rgb_pixels(part)
    if decode == "view":
        array.flags.writeable = False
        return array
    return array.copy() if decode == "numpy" else torch.from_numpy(array.copy())


def _file_bytes(part: memoryview) -> bytes:
    found = pictures.source_bytes(part)
    if not isinstance(found, bytes):
        raise UserError("this store holds pixels, not image files; decode='tensor' or 'pil'")
    return found


def empty_column(field: Field, count: int) -> torch.Tensor:
    """Return memory for a plain field of a batch; in a worker memory that is shared already."""
    if field.kind in SCALARS:
        return torch.empty(count, dtype=SCALARS[field.kind])
    dtype = torch.uint8
    if field.kind == "array":
        dtype = torch.from_numpy(np.empty(0, dtype=field.dtype)).dtype
    return empty_batch((count, *(field.shape or ())), dtype)


def empty_batch(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory for a batch; in a worker memory that is shared already."""
    if get_worker_info() is None or not hasattr(torch.UntypedStorage, "_new_shared"):
        return LEASES.take(shape, dtype)
    empty: Any = torch.empty(0, dtype=dtype)
    storage: Any = torch.UntypedStorage
    whole: torch.Tensor = empty.set_(
        storage._new_shared(int(np.prod(shape)) * empty.element_size()), 0, tuple(shape)
    )
    return whole


def _given(field: Field, row: torch.Tensor) -> Any:
    """Return one sample's value as the source gave it."""
    if field.kind in SCALARS:
        return row.item()
    if field.holder == "list":
        return row.tolist()
    return row.numpy() if field.holder == "numpy" else row


AHEAD = 1
"""Batches that wait alongside those in the making."""


class BatchThreads:
    """An iterable of batches, in the order of its batch sampler.

    Nothing is sent, pickled or copied. Right for data sets whose work is done outside of Python's
    interpreter lock, such as `Cropped` and packed samples of one shape: their batches are a few
    calls into torch and numpy. Samples that Python code makes belong in a `DataLoader`'s worker
    processes.

        data = flatout.data.cropped(flatout.data.open(path), flatout.data.Crops(side=224))
        order = flatout.data.GlobalOrder(len(data), batch_size=256)
        loader = flatout.data.BatchThreads(data, order)
        for images, labels in order.follow(loader): ...

    Args:
        data: a data set that makes whole batches, `__getitems__`.
        batch_sampler: gives the numbers of each batch; one pass over it is an epoch.
        threads: how many batches are made side by side; 0 for as many as there are cores.
        ahead: finished batches that may wait for the loop.

    Raises:
        UserError: if the data set makes single samples only.
    """

    def __init__(
        self,
        data: Any,
        batch_sampler: Iterable[Sequence[int]],
        *,
        threads: int = 0,
        ahead: int = AHEAD,
    ) -> None:
        if not hasattr(type(data), "__getitems__"):
            raise UserError(
                f"{type(data).__name__} makes no whole batches (__getitems__); use torch's "
                "DataLoader, whose workers are processes"
            )
        if threads < 0 or ahead < 0:
            raise UserError(f"threads={threads} and ahead={ahead} must be at least 0")
        self.dataset, self.batch_sampler = data, batch_sampler
        self.threads, self.ahead = threads or usable_cores(), ahead

    def __len__(self) -> int:
        sized: Any = self.batch_sampler
        return len(sized)

    def __iter__(self) -> Iterator[Any]:
        """Give the batches of an epoch; what is under way when the loop breaks off is dropped."""
        pool = single_threads(self.threads)
        waiting: deque[Future[Any]] = deque()
        try:
            for indices in self.batch_sampler:
                waiting.append(pool.submit(_batch, self._task(indices)))
                if len(waiting) >= self.threads + self.ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            waiting.clear()
            pool.shutdown(wait=True, cancel_futures=True)

    def _task(self, indices: Sequence[int]) -> Callable[[], Any]:
        """Return what makes a batch; random numbers are drawn here, in the order of the batches."""
        prepare = getattr(self.dataset, "task", None)
        if prepare is not None:
            task: Callable[[], Any] = prepare(indices)
            return task
        return functools.partial(self.dataset.__getitems__, indices)


def _batch(task: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return collate(task())


def single_threads(count: int) -> ThreadPoolExecutor:
    """Return running threads in which torch's operations use no threads of their own.

    Torch keeps the number for each thread, and gives a new thread the one that was set last, by
    whichever: it is set back for those that others start later.
    """
    before = torch.get_num_threads()
    ready = threading.Barrier(count + 1)

    def start() -> None:
        torch.get_num_threads()  # else this thread's first operation sets it to the common number
        torch.set_num_threads(1)
        ready.wait()

    pool = ThreadPoolExecutor(count, thread_name_prefix="flatout-batches", initializer=start)
    for _ in range(count):
        pool.submit(int)
    ready.wait()
    torch.set_num_threads(before)
    return pool
