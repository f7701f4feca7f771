"""Many samples of one shape at once: their values copied out of the file shards, field by field.

Where all records of a store are equally long and laid out alike, a field of a sample is a row of a
matrix that the file already is: a batch is rows picked by number, without a call for each sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data import pictures
from flatout.data.format import Field
from flatout.data.packed_store import Bytes, Places, Store, check_records

SCALAR_TYPES = {"int": "<i8", "float": "<f8", "bool": "?"}
"""How a number is stored."""
SMALL_ROW_BYTES = 4096
"""Below, picking rows twice (out of the file shard, into the batch) is quicker than a call each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the fields lie in each record of a store."""

    record_bytes: int
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each field's value."""


def find_layout(store: Store) -> Layout | None:
    """Return the layout that all records of a store have; None where they differ."""
    fields = store.header.fields
    if not len(store) or not all(is_plain(field) for field in fields):
        return None
    _, begins, ends = store.spans(np.arange(len(store)))
    size = int(ends[0] - begins[0])
    spans = _spans(fields)
    if spans[-1][1] != size or (ends - begins != size).any() or (begins % size).any():
        return None
    return Layout(record_bytes=size, spans=spans)


def is_plain(field: Field) -> bool:
    """Tell whether a field's value has the same number of bytes in every sample, uncoded."""
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


def gather(store: Store, layout: Layout, places: Places, targets: Sequence[Any]) -> None:
    """Copy the fields of these samples, one row each, into a contiguous array for each field."""
    if not len(places):
        return
    check_records(store, places)
    shards, begins, _ = store.spans(places)
    numbers = begins // layout.record_bytes
    records = {shard: _records(store.arrays[shard], layout) for shard in set(shards.tolist())}
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


def _records(whole: Bytes, layout: Layout) -> Bytes:
    return whole.reshape(-1, layout.record_bytes)
