"""Lend true tensors, for one call of torch, in place of images that are followed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatout.data.aliases import leads_to
from flatout.data.levels import Pixels, UnfollowableError, planes


def computed(pixels: Pixels) -> torch.Tensor:
    """Return the tensor that the pixels stand for."""
    values = np.ascontiguousarray(pixels.view) if pixels.is_ordered else pixels.view
    values = values.copy("K") if any(stride < 0 for stride in values.strides) else values
    with torch._C.DisableTorchFunction():
        source = torch.from_numpy(values if values.flags.writeable else values.copy("K"))
        levels = pixels.grid.levels
        made = torch.empty_like(source, dtype=levels.dtype)
        pairs = zip(planes(made, pixels.axis), planes(source, pixels.axis), strict=True)
        for channel, (target, plane) in enumerate(pairs):
            target.copy_(levels[channel if len(levels) > 1 else 0][plane.long()])
    return made


def exchanged(kind: type, value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a value with all of a kind, also in lists and the like, exchanged for others."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        parts = [exchanged(kind, item, change) for item in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: exchanged(kind, item, change) for key, item in value.items()}
    return value


def called(kind: type, func: Any, args: Any, kwargs: Any) -> Any:
    """Let a function of torch's have true tensors; what it writes or hands out again is kept.

    Args:
        kind: the type of what stands for tensors.
        func: the function.
        args: its arguments.
        kwargs: those given by name.

    Raises:
        UnfollowableError: if the function changes in place what stands for a tensor, or hands out
            memory that others see as well.
    """
    _refuse_writing(kind, func, args, kwargs)
    lent: dict[int, tuple[Any, Tensor, int | None]] = {}

    def lend(lazy: Any) -> Tensor:
        if id(lazy) not in lent:
            made = computed(lazy.pixels)
            lent[id(lazy)] = lazy, made, _version(made)
        return lent[id(lazy)][1]

    found = func(*exchanged(kind, args, lend), **exchanged(kind, kwargs, lend))
    for lazy, made, version in lent.values():
        with torch._C.DisableTorchFunction():
            start, length = made.data_ptr(), made.numel() * made.element_size()
            is_written = version is None or _version(made) != version
            if is_written or leads_to(found, start, length):
                lazy.keep(made)
    return found


def _version(made: Tensor) -> int | None:
    """Return how often a tensor was written to; torch does not count it of inference's."""
    return None if made.is_inference() else made._version


def _refuse_writing(kind: type, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    name = str(getattr(func, "__name__", func)).partition(".")[0]
    is_in_place = name in ("__setitem__", "__set__") or (
        (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    )
    writes = (args and isinstance(args[0], kind) and is_in_place) or isinstance(
        kwargs.get("out"), kind
    )
    if writes and name not in ("__index__", "__invert__", "__int__"):
        raise UnfollowableError(f"torch's {name} writes into a scaled image")
