"""Put a packed store under a user's data set, after comparing samples of both.

The result is of a class derived from the data set's own and shares its attributes, so that a
script which asks `loader.dataset` anything finds what it knows.
"""

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from flatout.core.errors import NotApplicable
from flatout.data.changes import Watch
from flatout.data.encoding import encode
from flatout.data.forked import ForkedError, in_fork
from flatout.data.order import permutation
from flatout.data.packed_store import Store
from flatout.data.reader import PackedDataset
from flatout.data.redirect import Redirect
from flatout.data.repeats import examine, reseed
from flatout.data.stand_in import stand_in

COMPARED = 48
"""Samples drawn by a seed and compared; where one in ten differs, that is missed once in 150."""
LIMIT_S = 60.0
"""Longest time for comparing."""
REPEATED = 16
"""Times that a sample which differs is asked for again, to tell a coin of its own from a change."""
PACKED = "_flatout_packed"


def is_packed(dataset: Any) -> bool:
    """Tell whether a data set reads from a packed store already."""
    return isinstance(dataset, PackedDataset) or hasattr(type(dataset), PACKED)


def with_stored_images(dataset: Any, store: Store, root: str = "") -> Any:
    """Return the data set with its image files read from the store, after comparing samples.

    Works for any map-style data set that opens its files with Pillow; labels, transforms and
    random augmentation stay its own.

    Args:
        dataset: the user's.
        store: packed from the files that the data set opens.
        root: where those files lie now; by default where they lay when they were packed.

    Raises:
        NotApplicable: if a compared sample differs, or was not read from the store.
    """
    if not store.names:
        raise NotApplicable("the store does not know its samples' files by name")
    redirect = Redirect(store, root or str(store.header.source["root"]))
    changed = _redirected(dataset, redirect, is_aligned=False)
    found = _compared(dataset, changed, redirect)
    return _redirected(dataset, redirect, is_aligned=found)


def with_stored_samples(dataset: Any, store: Store) -> Any:
    """Return the data set with whole samples from the store, after comparing samples.

    Raises:
        NotApplicable: if its samples are not the same each time, or not those of the store.
    """
    if len(store) != len(dataset):
        raise NotApplicable(f"the store has {len(store)} samples, the data set {len(dataset)}")
    found = examine(dataset)
    if not found.is_same:
        raise NotApplicable(f"{found.trouble}, and a store holds one version of each")
    data = PackedDataset(store, order="source")
    watch = Watch(dataset)
    changed = _replaced(dataset, data, watch)
    _compared(dataset, changed, None)
    _watches.add(watch)
    return changed


_watches: WeakSet[Watch] = WeakSet()
"""Of the data sets whose samples come from a store here."""


def late_trouble() -> str:
    """Return what the script changed of a set whose samples came from a store; empty if nothing.

    From then on the set makes its samples itself: the store has those of before.
    """
    troubles = (watch.trouble for watch in _watches if watch.is_changed())
    return next((f"{x}: none came from the store from then on" for x in troubles), "")


def compared_indices(count: int) -> list[int]:
    """Return which samples are compared: the first, the last, and some drawn by a fixed seed.

    >>> compared_indices(3)
    [0, 1, 2]
    """
    drawn = permutation(count, seed=0, epoch=0)[: COMPARED - 2]
    return sorted({0, count - 1, *map(int, drawn)})


def _compared(dataset: Any, changed: Any, redirect: Redirect | None) -> bool:
    """Compare samples in a copy of the process: objects and random streams here stay as they are.

    Returns:
        Whether the samples have the numbers that they had in the source of the store.

    Raises:
        NotApplicable: if a sample differs.
    """
    if not len(dataset):
        raise NotApplicable("the data set is empty")
    try:
        trouble, is_aligned = in_fork(lambda: _compare(dataset, changed, redirect), LIMIT_S)
    except ForkedError as error:
        raise NotApplicable(f"its samples could not be compared: {error}") from None
    if trouble:
        raise NotApplicable(trouble)
    return bool(is_aligned)


def _compare(dataset: Any, changed: Any, redirect: Redirect | None) -> tuple[str, bool]:
    """Return why both data sets are not the same, and whether they number their samples alike."""
    is_aligned = True
    for index in compared_indices(len(dataset)):
        expected = _sample(dataset, index)
        if redirect is not None:
            read = _read_by(redirect, dataset, index)
            if not read:
                return _words(index, redirect), False
            is_aligned &= redirect.store.index["original"][read[0]] == index
        if expected != _sample(changed, index):
            return _words_for_difference(dataset, index, expected), False
    return "", bool(is_aligned)


def _words_for_difference(dataset: Any, index: int, expected: bytes) -> str:
    if any(_sample(dataset, index) != expected for _ in range(REPEATED)):
        return f"sample {index} is another one each time, whatever the seeds"
    return f"sample {index} of the store differs from the data set's"


def _words(index: int, redirect: Redirect) -> str:
    return (
        f"sample {index} does not come from the packed folder {redirect.root}, or its file is not "
        "opened with Pillow (where the folder was moved, set root)"
    )


def _sample(dataset: Any, index: int) -> bytes:
    """Return a sample as bytes, drawn with the random streams in a known place."""
    reseed(index + 1)
    return b"".join(encode(dataset[index]))


def _read_by(redirect: Redirect, dataset: Any, index: int) -> list[int]:
    """Return the places of the store that a sample is read from."""
    with redirect.opened() as read:
        dataset[index]
    return read


def _redirected(dataset: Any, redirect: Redirect, is_aligned: bool) -> Any:  # noqa: FBT001  pickled
    def get(_self: Any, index: Any) -> Any:
        with redirect.opened():
            return dataset[index]

    def get_many(_self: Any, indices: Any) -> Any:
        with redirect.opened():
            return dataset.__getitems__(indices)

    again = (_redirected, (dataset, redirect, is_aligned))
    store = redirect.store if is_aligned else None
    return _stand_in(dataset, store, get, get_many, again)


def _replaced(dataset: Any, data: PackedDataset, watch: Watch) -> Any:
    def get(_self: Any, index: Any) -> Any:
        return dataset[index] if watch.is_changed() else stored(index)

    def stored(index: Any) -> Any:
        try:
            number = operator.index(index)
        except TypeError:
            with watch.reading():
                return dataset[index]
        return data[number]

    def get_many(_self: Any, indices: Any) -> Any:
        if watch.is_changed():
            return dataset.__getitems__(indices)
        return [stored(index) for index in indices]

    again = (_replaced, (dataset, data, watch))
    return _stand_in(dataset, data.store, get, get_many, again)


def _stand_in(
    dataset: Any,
    store: Store | None,
    get: Callable[[Any, Any], Any],
    get_many: Callable[[Any, Any], Any],
    again: tuple[Any, ...],
) -> Any:
    """Return an object that shares a data set's class and attributes and gives other samples."""
    members: dict[str, Any] = {PACKED: store, "__getitem__": get}
    if hasattr(type(dataset), "__getitems__"):
        members["__getitems__"] = get_many
    return stand_in(dataset, members, again)
