"""Follow images of bytes while a batch is made, and only then and there.

`Following` follows what Pillow, numpy and torch make of them. OpenCV's lookup in a table is
followed, too (`replacements`): the table is what each byte became.
"""

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flatout.agent import patching
from flatout.data.byte_batches.arrays import ByteArray, LazyArray
from flatout.data.byte_batches.levels import LEVELS, MIN_BYTES, Grid, Pixels, can_follow, contiguous
from flatout.data.byte_batches.tensors import FollowTensors, LazyTensor, from_array

MODULE = "cv2"
SINGLE = (2, 3)
"""Dimensions of a plane and of an image; OpenCV drops a third axis of length 1."""


def replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return OpenCV's functions that are replaced; none where the script has not imported it.

    So albumentations scales its images: one table for all channels, one with a column for each
    channel, or one for each channel's plane and the planes merged. A table is followed whoever made
    it.
    """
    module = sys.modules.get(MODULE)
    if module is None or not (hasattr(module, "LUT") and hasattr(module, "merge")):
        return []
    return [(module, "LUT", _lookup), (module, "merge", _merge)]


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def look_up(source: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_scaling(source, table):
            return original(source, table, *args, **kwargs)
        # A copy: the array may be filled again for the next sample.
        values = np.array(source, order="K", subok=False)
        levels = np.ascontiguousarray(np.array(table).reshape(LEVELS, -1).T)
        axis = None if len(levels) == 1 else values.ndim - 1
        return LazyArray(Pixels(values, Grid(levels, None), axis))

    return look_up


def is_scaling(source: Any, table: Any) -> bool:
    """Return whether a lookup makes floating point of an image of bytes."""
    # What is followed passes for an array, but OpenCV would refuse it.
    are_arrays = isinstance(source, np.ndarray) and isinstance(table, np.ndarray)
    if not are_arrays or isinstance(source, LazyArray) or isinstance(table, LazyArray):
        return False
    if source.dtype != np.uint8 or source.ndim not in SINGLE or source.size < MIN_BYTES:
        return False
    is_plane = source.ndim == min(SINGLE)
    if table.dtype.kind != "f" or not (is_plane or source.shape[-1] > 1):
        return False
    if table.size == LEVELS:
        return True
    # A column for each channel, in a table that OpenCV takes for one of so many channels.
    columns = 1 if is_plane else source.shape[-1]
    return table.shape in ((LEVELS, 1, columns), (1, LEVELS, columns))


def _merge(original: Callable[..., Any]) -> Callable[..., Any]:
    def merge(planes: Any, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(plane, LazyArray) for plane in planes):
            return original(planes, *args, **kwargs)
        if args or kwargs or not _are_alike(planes):
            plain = [x.settle() if isinstance(x, LazyArray) else x for x in planes]
            return original(plain, *args, **kwargs)
        parts = [plane.pixels for plane in planes]
        levels = np.concatenate([part.grid.levels for part in parts])
        values = original([part.view for part in parts])
        return LazyArray(Pixels(values, Grid(levels, None), values.ndim - 1))

    return merge


def _are_alike(planes: Sequence[Any]) -> bool:
    """Return whether all are planes of one image, each with a table of its own."""
    if len(planes) < 2 or not all(isinstance(plane, LazyArray) for plane in planes):
        return False
    if any(plane.made is not None for plane in planes):
        return False
    parts = [plane.pixels for plane in planes]
    forms = {(part.view.shape, part.grid.levels.dtype, part.is_ordered) for part in parts}
    are_planes = all(part.view.ndim == min(SINGLE) for part in parts)
    are_plain = all(len(part.grid.levels) == 1 for part in parts)
    return len(forms) == 1 and are_planes and are_plain


Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]


class Following:
    """Follows what a thread computes from images, Pillow's and tensors of bytes, while it is open.

    `numpy.asarray`, `numpy.array`, `numpy.ascontiguousarray`, `torch.from_numpy`, `torch.as_tensor`
    and `torch.tensor` are then functions that know followed images; other threads pass through them
    to the originals. It is opened for every batch, and its patches are made once.
    """

    def __init__(self) -> None:
        self.threads: set[int] = set()
        """Those that have it open."""
        self._patches: dict[tuple[str, str], patching.Patch] = {}

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Follow in the running thread."""
        self.threads.add(threading.get_ident())
        for module, name, make in (*REPLACED, *replacements()):
            patch = self._patches.get((module.__name__, name))
            if patch is None:
                replacing = functools.partial(self._replacing, make)
                self._patches[module.__name__, name] = patching.wrap(module, name, replacing)
            else:
                patch.apply()
        try:
            with FollowTensors():
                yield
        finally:
            self.threads.discard(threading.get_ident())
            for patch in self._patches.values() if not self.threads else ():
                patch.undo()

    def _replacing(self, make: Replacement, original: Callable[..., Any]) -> Callable[..., Any]:
        replacement = make(original)

        def choose(*args: Any, **kwargs: Any) -> Any:
            is_followed = threading.get_ident() in self.threads
            return replacement(*args, **kwargs) if is_followed else original(*args, **kwargs)

        return choose


def _is_picture(value: Any) -> bool:
    """Return whether a value is a picture of Pillow's, without importing it."""
    # Of the type: the value itself would make all its bytes to answer.
    return hasattr(type(value), "__array_interface__") and hasattr(value, "getbands")


def _array(original: Callable[..., Any], *, copies: bool = False) -> Callable[..., Any]:
    def make(value: Any, dtype: Any = None, **kwargs: Any) -> Any:
        if isinstance(value, LazyArray):
            return _again(original, value, dtype, {"copy": copies} | kwargs)
        if isinstance(value, ByteArray) and dtype is not None:
            return value.astype(dtype)
        if not _is_picture(value):
            return original(value, dtype, **kwargs)
        values = original(value, **kwargs)
        made = values.view(ByteArray) if can_follow(values) else values  # where it is worth it
        if dtype is None:
            return made
        return made.astype(dtype) if isinstance(made, ByteArray) else original(made, dtype)

    return make


def _again(original: Callable[..., Any], value: LazyArray, dtype: Any, asked: Any) -> Any:
    """Return a followed array as an array of numpy's, as `asarray` and `array` do."""
    order = asked.get("order") or "K"
    is_other = dtype is not None and np.dtype(dtype) != value.dtype
    if value.made is not None:
        is_same = not asked["copy"] and not is_other and order == "K"
        return value if is_same else original(value.made, dtype, **asked)
    found = value if order == "K" else LazyArray(value.pixels.ordered())
    if is_other:
        return found.astype(dtype)
    return found.copy(order="K") if asked["copy"] else found


def _contiguous(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(value: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(value, LazyArray) and value.made is not None:
            return original(value.made, *args, **kwargs)
        if isinstance(value, LazyArray) and not args and not kwargs:
            return LazyArray(value.pixels.ordered())
        if isinstance(value, ByteArray) and not args and not kwargs:
            return contiguous(value).view(ByteArray)
        return original(value, *args, **kwargs)

    return make


def _tensor(original: Callable[..., Any], *, copies: bool = False) -> Callable[..., Any]:
    def make(value: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(value, LazyArray):
            return original(value, *args, **kwargs)
        if value.made is not None:
            return original(value.made, *args, **kwargs)
        dtype = kwargs.pop("dtype", None) or (args[0] if args else None)
        if kwargs or len(args) > 1 or value.pixels.is_backwards:
            return original(np.asarray(value.__array__()), *args, **kwargs)
        lazy: Any = LazyTensor(from_array(value.pixels).pixels)
        if copies:
            lazy = LazyTensor(lazy.pixels.ordered().copied())
        return lazy if dtype is None else lazy.to(dtype)

    return make


REPLACED: tuple[tuple[Any, str, Replacement], ...] = (
    (np, "asarray", _array),
    (np, "array", functools.partial(_array, copies=True)),
    (np, "ascontiguousarray", _contiguous),
    (torch, "from_numpy", _tensor),
    (torch, "as_tensor", _tensor),
    (torch, "tensor", functools.partial(_tensor, copies=True)),
)
"""Functions through which pictures become arrays, and arrays tensors."""
