"""Put a packed store under a script's data set, after comparing samples of both.

`with_stored_images` gives it the store's images, `with_stored_samples` whole samples; the result is
of a class derived from the data set's own and shares its attributes, so that a script which asks
`loader.dataset` anything finds what it knows. `store_behind` finds the packed store that a data set
reads from already, and how the data set numbers its samples.
"""

import operator
import os
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, wraps
from pathlib import Path
from typing import Any

import numpy as np

from flatout.agent import patching
from flatout.data import pictures
from flatout.data.packed_store import PackedStore, Places
from flatout.data.proof.changes import ChangeWatch
from flatout.data.proof.dataset_facts import examine, reseed, stand_in
from flatout.data.proof.forked import ForkedError, in_fork
from flatout.data.reader import PackedDataset
from flatout.data.sampler import permutation
from flatout.data.sources.source import sampled_numbers
from flatout.data.values import build, encode, structure_of
from flatout.records.errors import NotApplicable


class Redirect:
    """Images of a store by the paths of the files they were packed from.

    A data set that opens its images with Pillow finds them in the store: `Image.open(path)`, and
    `Image.open(file)` for an open file, give the store's image where the path is below the folder
    that was packed. Everything else of the data set stays as it is. Of a sample of the folder an
    image stands for each one that it lacks, one of the same folder where there is one.
    """

    def __init__(self, store: PackedStore, root: str) -> None:
        self.store, self.root = store, root
        self.below: dict[str, str] = {}
        """Each folder that was asked for, as a path from the root: links are followed once."""

    @cached_property
    def found(self) -> dict[str, int]:
        """The place of each image by its path below the root; tables may name whole paths."""
        packed_root = str(self.store.header.source["root"])
        names = (
            os.path.relpath(name, packed_root) if name.startswith(os.sep) else name
            for name in self.store.names
        )
        return {os.path.normpath(name): place for place, name in enumerate(names)}

    @cached_property
    def by_folder(self) -> dict[str, list[int]]:
        """The places of the images in each folder below the root."""
        places: dict[str, list[int]] = {}
        for name, place in self.found.items():
            places.setdefault(str(Path(name).parent), []).append(place)
        return places

    @cached_property
    def image_at(self) -> int:
        """Which field is the image."""
        return next(n for n, field in enumerate(self.store.header.fields) if field.kind == "image")

    @contextmanager
    def opened(self) -> Iterator[list[int]]:
        """Redirect Pillow in this thread; gives the places that were read, as they are read."""
        read: list[int] = []
        with _guard:
            _install()
        before = getattr(_active, "redirect", None)
        _active.redirect = (self, read)
        try:
            yield read
        finally:
            _active.redirect = before

    def find(self, opened: Any) -> int | None:
        """Return the place of what was asked for, None where the store does not have it."""
        path = opened if isinstance(opened, str | os.PathLike) else getattr(opened, "name", None)
        if not isinstance(path, str | os.PathLike):
            return None
        folder, name = os.path.split(os.path.abspath(os.fspath(path)))  # noqa: PTH100  keeps links
        if folder not in self.below:
            self.below[folder] = os.path.relpath(Path(folder).resolve(), self.root)
        below = os.path.normpath(os.path.join(self.below[folder], name))  # noqa: PTH118
        place = self.found.get(below)
        if place is None and self.store.header.sample_of and not below.startswith(os.pardir):
            alike = self.by_folder.get(str(Path(below).parent)) or range(len(self.store))
            place = alike[zlib.crc32(os.fsencode(below)) % len(alike)]
        return place

    def image(self, place: int) -> Any:
        """Return the stored image."""
        return pictures.open_image(self.store.parts(place)[self.image_at])


_active = threading.local()
_guard = threading.Lock()


@cache
def _install() -> None:
    """Put the switch into Pillow, once per process; it does nothing where no redirect is active."""
    from PIL import Image

    def redirecting(plain: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(plain)
        def open_redirected(fp: Any, mode: Any = "r", formats: Any = None) -> Any:
            active = getattr(_active, "redirect", None)
            place = active[0].find(fp) if active is not None else None
            if active is None or place is None:
                return plain(fp, mode, formats)
            active[1].append(place)
            return active[0].image(place)

        return open_redirected

    patching.wrap(Image, "open", redirecting)


COMPARED = 48
"""Samples drawn by a seed and compared; where one in ten differs, that is missed once in 150."""
LIMIT_S = 60.0
"""Longest time for comparing."""
REPEATED = 16
"""Times that a sample which differs is asked for again, to tell a coin of its own from a change."""
PACKED = "_flatout_packed"
WATCH = "_flatout_store_watch"


def is_packed(dataset: Any) -> bool:
    """Return whether a data set reads from a packed store already."""
    return isinstance(dataset, PackedDataset) or hasattr(type(dataset), PACKED)


def with_stored_images(dataset: Any, store: PackedStore, root: str = "") -> Any:
    """Return the data set with its image files read from the store, after comparing samples.

    Works for any map-style data set that opens its files with Pillow; labels, transforms and
    random augmentation stay its own. Of a store of a sample, those that it has are compared.

    `root`: where the files are now, if not where they were when they were packed.
    """
    if not store.names:
        raise NotApplicable("the store does not know its samples' files by name")
    redirect = Redirect(store, root or str(store.header.source["root"]))
    changed = _redirected(dataset, redirect, is_aligned=False)
    is_aligned = _compared(dataset, changed, store, redirect)
    return _redirected(dataset, redirect, is_aligned=is_aligned and not store.header.sample_of)


def with_stored_samples(dataset: Any, store: PackedStore) -> Any:
    """Return the data set with whole samples from the store, after comparing samples.

    Of a store of a sample, one stands for each that it lacks.
    """
    count = store.header.sample_of or len(store)
    if count != len(dataset):
        raise NotApplicable(f"the store has {count} samples, the data set {len(dataset)}")
    found = examine(dataset)
    if not found.is_same:
        raise NotApplicable(f"{found.trouble}, and a store holds one version of each")
    data = PackedDataset(store, order="source")
    watch = ChangeWatch(dataset)
    try:
        layouts = in_fork(lambda: _layouts(dataset[0]), LIMIT_S)
    except ForkedError as error:
        raise NotApplicable(f"its samples could not be compared: {error}") from None
    changed = _replaced(dataset, data, watch, layouts)
    _compared(dataset, changed, store, None)
    return changed


def watch_of(dataset: Any) -> ChangeWatch | None:
    """Return what says whether the script changed a set whose whole samples come from a store."""
    watch: ChangeWatch | None = getattr(type(dataset), WATCH, None)
    return watch


def compared_indices(count: int) -> list[int]:
    """Return which samples are compared: the first, the last, and some drawn by a fixed seed.

    >>> compared_indices(3)
    [0, 1, 2]
    """
    drawn = permutation(count, seed=0, epoch=0)[: COMPARED - 2]
    return sorted({0, count - 1, *map(int, drawn)})


def source_numbers(store: PackedStore) -> Places:
    """Return by place in the store which sample of its source each one is."""
    original: Places = store.index["original"].astype(np.int64)
    if not store.header.sample_of:
        return original
    numbers: Places = sampled_numbers(store.header.sample_of, int(store.header.source["samples"]))
    return numbers[original]


def _indices_compared(store: PackedStore, count: int) -> list[int]:
    """Return which samples of a data set are compared with a store of them, or of some of them."""
    if not store.header.sample_of:
        return compared_indices(count)
    held = np.sort(source_numbers(store))
    return [int(n) for n in held[:: -(-len(held) // COMPARED)] if n < count]


def _compared(dataset: Any, changed: Any, store: PackedStore, redirect: Redirect | None) -> bool:
    """Compare samples in a copy of the process: objects and random streams here stay as they are.

    Returns:
        Whether the samples have the numbers that they had in the source of the store.
    """
    if not len(dataset):
        raise NotApplicable("the data set is empty")
    try:
        trouble, is_aligned = in_fork(lambda: _compare(dataset, changed, store, redirect), LIMIT_S)
    except ForkedError as error:
        raise NotApplicable(f"its samples could not be compared: {error}") from None
    if trouble:
        raise NotApplicable(trouble)
    return bool(is_aligned)


def _compare(
    dataset: Any, changed: Any, store: PackedStore, redirect: Redirect | None
) -> tuple[str, bool]:
    """Return why both data sets are not the same, and whether they number their samples alike."""
    is_aligned, numbers = True, source_numbers(store)
    for index in _indices_compared(store, len(dataset)):
        expected, is_own = _sample(dataset, index), True
        if redirect is not None:
            with redirect.opened() as read:
                dataset[index]
            if not read:
                return _words(index, redirect), False
            is_own = bool(numbers[read[0]] == index)
            is_aligned &= is_own
        # Another image may stand for one that a sample of the source does not have.
        is_known = is_own or not store.header.sample_of
        if is_known and expected != _sample(changed, index):
            return _words_for_difference(dataset, index, expected), False
    return "", is_aligned


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


def _layouts(sample: Any) -> list[Any]:
    """Return shape and strides of each field that is a tensor; nothing if all lie row by row.

    A store has them row by row. What follows may compute otherwise, and so round otherwise.
    """
    import torch

    found = [
        [list(value.shape), torch.empty_like(value).stride()] if torch.is_tensor(value) else None
        for value in structure_of(sample)[2]
    ]
    plain = [x is None or torch.empty(x[0], device="meta").stride() == x[1] for x in found]
    return [] if all(plain) else found


def _laid_out(sample: Any, layouts: Sequence[Any]) -> Any:
    """Return a sample with tensors that lie in memory as those of the first sample did."""
    structure, names, values = structure_of(sample)

    def laid(value: Any, layout: Any) -> Any:
        if layout is None or list(value.shape) != layout[0]:
            return value
        return value.new_empty_strided(*layout).copy_(value)

    return build(structure, names, list(map(laid, values, layouts)))


def _replaced(
    dataset: Any, data: PackedDataset, watch: ChangeWatch, layouts: Sequence[Any] = ()
) -> Any:
    held = np.sort(source_numbers(data.store)).tolist() if data.store.header.sample_of else []
    places = {number: place for place, number in enumerate(held)}

    def get(_self: Any, index: Any) -> Any:
        return dataset[index] if watch.is_changed() else stored(index)

    def stored(index: Any) -> Any:
        try:
            number = operator.index(index)
        except TypeError:
            with watch.reading():
                return dataset[index]
        sample = data[places.get(number, number % len(data)) if places else number]
        return _laid_out(sample, layouts) if layouts else sample

    def get_many(_self: Any, indices: Any) -> Any:
        if watch.is_changed():
            return dataset.__getitems__(indices)
        return [stored(index) for index in indices]

    again = (_replaced, (dataset, data, watch, layouts))
    return _stand_in(dataset, data.store, get, get_many, again, watch)


def _stand_in(
    dataset: Any,
    store: PackedStore | None,
    get: Callable[[Any, Any], Any],
    get_many: Callable[[Any, Any], Any],
    again: tuple[Any, ...],
    watch: ChangeWatch | None = None,
) -> Any:
    """Return an object that shares a data set's class and attributes and gives other samples."""
    members: dict[str, Any] = {PACKED: store, WATCH: watch, "__getitem__": get}
    if hasattr(type(dataset), "__getitems__"):
        members["__getitems__"] = get_many
    return stand_in(dataset, members, again)


DEPTH = 3
"""Wrappers in wrappers that are looked through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The store behind a data set."""

    store: PackedStore
    is_reordered: bool
    """Whether samples are numbered as in the store's source, not as they are stored."""

    def will_need(self, numbers: Sequence[int]) -> int:
        """Let the kernel read the records of samples ahead; return how many these are."""
        wanted = np.asarray(numbers, dtype=np.int64)
        self.store.will_need(self.store.by_original[wanted] if self.is_reordered else wanted)
        return len(wanted)


def store_behind(dataset: Any) -> Stored:
    """Return the store that has each sample of a data set, and how its samples are numbered.

    Scripts wrap what `flatout.data.open` gives in a data set of their own, for labels, crops or
    features. Such a wrapper is looked through only if it asks the store for sample i, and for
    nothing else, whenever it is asked for sample i itself.
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


def find_store(dataset: Any) -> PackedStore | None:
    """Return the store that a data set reads from, in whatever order; None without one."""
    found = (_stored(inner) for inner in _inside(dataset, DEPTH))
    return next((stored.store for stored in found if stored is not None), None)


def _stored(dataset: Any) -> Stored | None:
    if isinstance(dataset, PackedDataset):
        return Stored(store=dataset.store, is_reordered=dataset.is_reordered)
    store: PackedStore | None = getattr(type(dataset), PACKED, None)
    return None if store is None else Stored(store=store, is_reordered=True)


def _inside(dataset: Any, depth: int) -> Iterator[Any]:
    """Give the data set, then what it holds in attributes, if that has samples."""
    yield dataset
    if depth and not isinstance(dataset, PackedDataset):
        for held in vars(dataset).values() if hasattr(dataset, "__dict__") else ():
            if hasattr(type(held), "__getitem__") and hasattr(held, "__dict__"):
                yield from _inside(held, depth - 1)


def _check_numbers(dataset: Any, inner: Any) -> None:
    """Make sure, in a copy of the process, that sample i is made of sample i alone."""
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
