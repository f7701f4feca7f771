"""A data set whose samples are made once: the store stands in front of `__getitem__`.

The result is of a class derived from the data set's own and shares its attributes, so that a
script which asks `loader.dataset` anything finds what it knows. Once the script changes the data
set, the store is left alone and the samples are the data set's own.
"""

import operator
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from flatout.data.changes import Watch
from flatout.data.encoding import decode, encode
from flatout.data.forked import in_forks
from flatout.data.stand_in import stand_in
from flatout.data.store import Store

STORE = "_flatout_store"
SOURCE = "_flatout_source"
WATCH = "_flatout_watch"


def cached(dataset: Any, store: Store, watch: Watch | None = None) -> Any:
    """Return a data set that keeps its samples in the store, else the same.

    Args:
        dataset: what makes the samples.
        store: where they are kept.
        watch: what is known of its changes; a new one where nothing is.

    Raises:
        NotApplicable: if an object of its class cannot be made to share its attributes.
    """
    watch = watch or Watch(dataset)
    members = {
        STORE: store,
        SOURCE: dataset,
        WATCH: watch,
        "__getitem__": _get,
        "__getitems__": _get_many,
    }
    return stand_in(dataset, members, (cached, (dataset, store, watch)))


def is_cached(dataset: Any) -> bool:
    """Tell whether a data set came from `cached`."""
    return hasattr(type(dataset), STORE)


def store_of(dataset: Any) -> Store:
    """Return the store of a data set that came from `cached`."""
    store: Store = getattr(type(dataset), STORE)
    return store


def watch_of(dataset: Any) -> Watch:
    """Return what tells whether the script changed a data set that came from `cached`."""
    watch: Watch = getattr(type(dataset), WATCH)
    return watch


def _get(self: Any, index: Any) -> Any:
    if watch_of(self).is_changed():
        return getattr(type(self), SOURCE)[index]
    with _reading(self):
        return kept_or_made(self, index)


def kept_or_made(dataset: Any, index: Any) -> Any:
    """Return a sample of a data set that came from `cached`, whoever may have changed it."""
    store, source = store_of(dataset), getattr(type(dataset), SOURCE)
    key = key_of(index, source)
    found = store.find(key) if key is not None else None
    if found is not None:
        return decode(found)
    sample = source[index]
    if key is not None:
        store.add(key, encode(sample))
    return sample


def _reading(self: Any) -> AbstractContextManager[None]:
    """Let changes of the data set count as ours, unless every sample is in the store."""
    is_whole = store_of(self).count >= len(getattr(type(self), SOURCE))
    return nullcontext() if is_whole else watch_of(self).reading()


def _get_many(self: Any, indices: Any) -> list[Any]:
    source, has_batches = getattr(type(self), SOURCE), _makes_batches(self)
    if watch_of(self).is_changed():
        return source.__getitems__(indices) if has_batches else [source[i] for i in indices]
    if not has_batches:
        with _reading(self):
            return [kept_or_made(self, index) for index in indices]
    store = store_of(self)
    keys = [key_of(index, source) for index in indices]
    found = [store.find(key) if key is not None else None for key in keys]
    missing = [index for index, view in zip(indices, found, strict=True) if view is None]
    made = iter(_made(self, missing) if missing else ())
    samples = []
    for key, view in zip(keys, found, strict=True):
        sample = next(made) if view is None else decode(view)
        if view is None and key is not None:
            store.add(key, encode(sample))
        samples.append(sample)
    return samples


def _made(self: Any, indices: list[Any]) -> list[Any]:
    with watch_of(self).reading():
        return list(getattr(type(self), SOURCE).__getitems__(indices))


def _makes_batches(self: Any) -> bool:
    return hasattr(type(getattr(type(self), SOURCE)), "__getitems__")


def key_of(index: Any, dataset: Any) -> int | None:
    """Return the store's key of a sample, None for an index that is no number.

    >>> key_of(0, "abc"), key_of(-1, "abc"), key_of("a", "abc"), key_of(True, "abc")
    (1, 3, None, None)
    """
    if isinstance(index, bool):
        return None
    try:
        number = operator.index(index)
    except TypeError:
        return None
    return 1 + (number if number >= 0 else number + len(dataset))


def fill(make: Callable[[int], Any], count: int, *, processes: int, limit_s: float) -> int:
    """Call `make` for the indices below `count` in forked processes for at most so long.

    Returns:
        How many were made, as far as the processes could tell.
    """

    def part(first: int) -> Callable[[], int]:
        def work() -> int:
            ends_at, made = time.monotonic() + limit_s, 0
            for index in range(first, count, processes):
                if time.monotonic() > ends_at:
                    break
                make(index)
                made += 1
            return made

        return work

    answers = in_forks([part(first) for first in range(processes)], 1.5 * limit_s + 5.0)
    return sum(answer.get("value", 0) for answer in answers if answer)
