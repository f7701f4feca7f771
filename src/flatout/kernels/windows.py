"""Windows of pictures that are in memory, mirrored and normalised, a whole batch in one call.

The plain reference is `flatout.data.crop_batches.crop`, picture by picture with torch.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch

from flatout.kernels.compiled import load_function
from flatout.records.errors import NotApplicable

CHANNELS, COLUMNS = 3, 5
MOST_SIDE = 4096
"""Pixels: a row is turned round on the stack."""


def cut_windows(
    images: torch.Tensor,
    places: Any,
    boxes: Any,
    target: torch.Tensor,
    normal: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> bool:
    """Cut one window of each of these pictures into a batch; return False if one is outside.

    Args:
        images: uint8, count x height x width x 3, contiguous, in host memory.
        places: Which pictures: int64, one per window.
        boxes: int64, a row per window: top, left, height, width and whether it is mirrored.
        target: windows x side x side x 3, contiguous; uint8, or float32 with `normal`.
        normal: By what a byte is multiplied and what is added, float32, as long as a row of a
            window.

    Raises:
        NotApplicable: if there is no compiler.
        ValueError: if a tensor is not laid out as said.
    """
    side = target.shape[1]
    scale, shift = normal if normal is not None else (None, None)
    _check(images, target, boxes, normal)
    if len(places) and not 0 <= places.min() <= places.max() < len(images):
        return False
    trouble = _function()(
        images.data_ptr(),
        (ctypes.c_int64 * 2)(*images.shape[1:3]),
        places.ctypes.data,
        boxes.ctypes.data,
        len(places),
        side,
        scale.data_ptr() if scale is not None else None,
        shift.data_ptr() if shift is not None else None,
        target.data_ptr(),
    )
    return not trouble


def _check(images: torch.Tensor, target: torch.Tensor, boxes: Any, normal: Any) -> None:
    dtype = torch.uint8 if normal is None else torch.float32
    side = target.shape[1]
    is_fine = (
        images.dtype == torch.uint8
        and images.is_contiguous()
        and images.shape[-1] == CHANNELS
        and target.dtype == dtype
        and target.is_contiguous()
        and target.shape == (len(boxes), side, side, CHANNELS)
        and boxes.shape == (len(boxes), COLUMNS)
        and boxes.flags.c_contiguous
        and boxes.dtype == "int64"
        and all(x.numel() == side * CHANNELS and x.is_contiguous() for x in normal or ())
    )
    if not is_fine:
        raise ValueError("pictures, boxes or the batch are not laid out as cut_windows needs them")


class RowWriter:
    """Writes one window after the other into rows of a batch, with the same arithmetic."""

    def __init__(self, side: int, normal: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        self.side = side
        self.normal = normal
        self.scales = [None, None] if normal is None else [each.data_ptr() for each in normal]
        self.first = (ctypes.c_int64 * 1)(0)
        self.function = _function()

    def write(self, picture: torch.Tensor, box: Sequence[int], target: torch.Tensor) -> None:
        """Write the window that a box cuts out of a picture.

        Args:
            picture: uint8, height x width x 3, contiguous, in host memory.
            box: Top, left, height, width and whether it is mirrored.
            target: side x side x 3, contiguous; uint8, or float32 where it is normalised.
        """
        sides, edges = (ctypes.c_int64 * 2)(*picture.shape[:2]), (ctypes.c_int64 * COLUMNS)(*box)
        source, row = picture.data_ptr(), target.data_ptr()
        if self.function(source, sides, self.first, edges, 1, self.side, *self.scales, row):
            raise ValueError(f"the window {tuple(box)} does not lie in {tuple(picture.shape)}")


@functools.cache
def can_cut() -> bool:
    """Return whether this machine can compile it."""
    try:
        _function()
    except NotApplicable:
        return False
    return True


@functools.cache
def _function() -> Any:
    pointers, numbers = ctypes.c_void_p, ctypes.c_int64
    types = (*(pointers,) * 4, *(numbers,) * 2, *(pointers,) * 3)
    return load_function("windows", "cut_windows", *types)
