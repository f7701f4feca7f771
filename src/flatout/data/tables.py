"""OpenCV's lookup in a table, followed: the table is what each byte became, whoever made it.

So albumentations scales its images: one table for all channels, one with a column for each channel,
or one for each channel's plane and the planes merged.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from flatout.data.arrays import LazyArray
from flatout.data.levels import LEVELS, MIN_BYTES, Grid, Pixels

MODULE = "cv2"
SINGLE = (2, 3)
"""Dimensions of a plane and of an image; OpenCV drops a third axis of length 1."""


def replacements() -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return OpenCV's functions that are replaced; none where the script has not imported it."""
    module = sys.modules.get(MODULE)
    if module is None or not (hasattr(module, "LUT") and hasattr(module, "merge")):
        return []
    return [(module, "LUT", _lookup), (module, "merge", _merge)]


def _lookup(original: Callable[..., Any]) -> Callable[..., Any]:
    def look_up(source: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs or not is_scaling(source, table):
            return original(source, table, *args, **kwargs)
        # A copy: the array may be filled anew for the next sample.
        values = np.array(source, order="K", subok=False)
        levels = np.ascontiguousarray(np.array(table).reshape(LEVELS, -1).T)
        axis = None if len(levels) == 1 else values.ndim - 1
        return LazyArray(Pixels(values, Grid(levels, None), axis))

    return look_up


def is_scaling(source: Any, table: Any) -> bool:
    """Tell whether a lookup makes floating point of an image of bytes."""
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
            plain = [x.read() if isinstance(x, LazyArray) else x for x in planes]
            return original(plain, *args, **kwargs)
        parts = [plane.pixels for plane in planes]
        levels = np.concatenate([part.grid.levels for part in parts])
        values = original([part.view for part in parts])
        return LazyArray(Pixels(values, Grid(levels, None), values.ndim - 1))

    return merge


def _are_alike(planes: Sequence[Any]) -> bool:
    """Tell whether all are planes of one image, each with a table of its own."""
    if len(planes) < 2 or not all(isinstance(plane, LazyArray) for plane in planes):
        return False
    if any(plane.made is not None for plane in planes):
        return False
    parts = [plane.pixels for plane in planes]
    forms = {(part.view.shape, part.grid.levels.dtype, part.is_ordered) for part in parts}
    are_planes = all(part.view.ndim == min(SINGLE) for part in parts)
    are_plain = all(len(part.grid.levels) == 1 for part in parts)
    return len(forms) == 1 and are_planes and are_plain
