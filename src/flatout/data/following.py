"""Follow images of bytes while a batch is made, and only then and there."""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from flatout.data import tables
from flatout.data.arrays import ByteArray, LazyArray
from flatout.data.levels import can_follow, contiguous
from flatout.data.tensors import FollowTensors, LazyTensor, from_array

Replacement = Callable[[Callable[..., Any]], Callable[..., Any]]


_FOLLOWERS: set[int] = set()
"""Threads that follow now."""


def is_following() -> bool:
    """Tell whether the running thread follows."""
    return threading.get_ident() in _FOLLOWERS


@contextmanager
def following() -> Iterator[None]:
    """Follow what the running thread computes from images: Pillow's, and tensors of bytes.

    For its duration `numpy.asarray`, `numpy.array`, `numpy.ascontiguousarray`, `torch.from_numpy`,
    `torch.as_tensor` and `torch.tensor` are replaced by functions that know followed images; other
    threads pass through them to the originals.
    """
    wanted = [*REPLACED, *tables.replacements()]
    replaced = [(module, name, getattr(module, name)) for module, name, _ in wanted]
    for module, name, make in wanted:
        original = getattr(module, name)
        setattr(module, name, _only_in_followers(make(original), original))
    try:
        with follow_too():
            yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


@contextmanager
def follow_too() -> Iterator[None]:
    """Follow in this thread as well, while another one is `following`."""
    thread = threading.get_ident()
    _FOLLOWERS.add(thread)
    try:
        with FollowTensors():
            yield
    finally:
        _FOLLOWERS.discard(thread)


def _only_in_followers(
    replacement: Callable[..., Any], original: Callable[..., Any]
) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        return replacement(*args, **kwargs) if is_following() else original(*args, **kwargs)

    return choose


def _is_picture(value: Any) -> bool:
    """Tell whether a value is a picture of Pillow's, without importing it."""
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
        made = _of_picture(functools.partial(original, **kwargs), value)
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


def _of_picture(make: Callable[[Any], Any], picture: Any) -> Any:
    """Return a picture as an array that is followed, if it is worth it."""
    values = make(picture)
    return values.view(ByteArray) if can_follow(values) else values


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
