"""Find the packed store that a data set reads from, and how the data set numbers its samples.

Scripts wrap what `flatout.data.open` gives in a data set of their own, for labels, crops or
features. Such a wrapper is looked through only if it asks the store for sample i, and for nothing
else, whenever it is asked for sample i itself.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.core.errors import NotApplicable
from flatout.data.forked import ForkedError, in_fork
from flatout.data.matching import PACKED, compared_indices
from flatout.data.packed_store import Store
from flatout.data.reader import PackedDataset

DEPTH = 3
"""Wrappers in wrappers that are looked through."""
LIMIT_S = 60.0
"""Longest time for asking a wrapper."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The store behind a data set."""

    store: Store
    is_reordered: bool
    """Whether samples are numbered as in the store's source, not as they are stored."""

    def will_need(self, numbers: Sequence[int]) -> int:
        """Let the kernel read the records of samples ahead; return how many these are."""
        wanted = np.asarray(numbers, dtype=np.int64)
        self.store.will_need(self.store.by_original[wanted] if self.is_reordered else wanted)
        return len(wanted)


def store_behind(dataset: Any) -> Stored:
    """Return the store that has each sample of a data set, and how its samples are numbered.

    Raises:
        NotApplicable: if there is no such store, or the data set mixes or renumbers its samples.
    """
    for inner in _inside(dataset, DEPTH):
        found = _stored(inner)
        if found is None or len(found.store) != len(dataset):
            continue
        if inner is not dataset:
            _check_numbers(dataset, inner)
        return found
    raise NotApplicable(
        "the data set does not read its samples from a packed store, each under the number it "
        "had when it was packed"
    )


def find_store(dataset: Any) -> Store | None:
    """Return the store that a data set reads from, in whatever order; None without one."""
    found = (_stored(inner) for inner in _inside(dataset, DEPTH))
    return next((stored.store for stored in found if stored is not None), None)


def _stored(dataset: Any) -> Stored | None:
    if isinstance(dataset, PackedDataset):
        return Stored(store=dataset.store, is_reordered=dataset.is_reordered)
    store: Store | None = getattr(type(dataset), PACKED, None)
    return None if store is None else Stored(store=store, is_reordered=True)


def _inside(dataset: Any, depth: int) -> Iterator[Any]:
    """Give the data set, then what it holds in attributes, if that has samples."""
    yield dataset
    if depth and not isinstance(dataset, PackedDataset):
        for held in vars(dataset).values() if hasattr(dataset, "__dict__") else ():
            if hasattr(type(held), "__getitem__") and hasattr(held, "__dict__"):
                yield from _inside(held, depth - 1)


def _check_numbers(dataset: Any, inner: Any) -> None:
    """Make sure, in a copy of the process, that sample i is made of sample i alone.

    Raises:
        NotApplicable: if it is not, or that cannot be found out.
    """
    try:
        trouble = in_fork(lambda: _trouble(dataset, inner), LIMIT_S)
    except ForkedError as error:
        raise NotApplicable(f"its samples could not be asked for: {error}") from None
    if trouble:
        raise NotApplicable(trouble)


def _trouble(dataset: Any, inner: Any) -> str:
    """Return why a wrapper cannot be looked through; `inner` is changed for good."""
    asked = _listen(inner)
    for index in compared_indices(len(dataset)):
        asked.clear()
        dataset[index]
        if set(asked) != {index}:
            numbers = ", ".join(map(str, asked[:4])) or "no sample"
            return f"sample {index} of the data set is made of {numbers} of the packed store"
    return ""


def _listen(inner: Any) -> list[int]:
    """Let a data set note which samples it is asked for."""
    kind = type(inner)
    asked: list[int] = []

    def get(self: Any, index: Any) -> Any:
        asked.append(int(index))
        return kind.__getitem__(self, index)

    def get_many(self: Any, indices: Any) -> Any:
        asked.extend(map(int, indices))
        return kind.__getitems__(self, indices)

    members: dict[str, Any] = {"__getitem__": get}
    if hasattr(kind, "__getitems__"):
        members["__getitems__"] = get_many
    inner.__class__ = type(kind.__name__, (kind,), members)
    return asked
