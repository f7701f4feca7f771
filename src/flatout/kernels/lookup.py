"""Bytes to the values that a table has for them, in one kernel where there is a GPU with Triton.

Torch's own way makes an index of eight bytes for each byte, adds to it and gathers: three trips
through memory. `flatout.kernels.lookup_launch` reads each byte and writes its value, and cuts
windows out of pictures and mirrors them while it is at it. What it gives is the table's own values;
the first batch of each form is made both ways, and torch's way stays wherever they differ in a bit
or a stride. Not measured on a GPU yet.
"""

import importlib.util
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

LEVELS = 256
_KEPT: dict[Any, tuple[int, ...] | None] = {}
"""Of each form of a batch the strides that torch's way gives; None where the kernel is not used."""


def looked_up(values: torch.Tensor, levels: torch.Tensor, axis: int | None) -> torch.Tensor:
    """Return the value of each byte, on the device of the bytes.

    Args:
        values: uint8, any shape and strides.
        levels: 256 values, a row for each channel or one for all.
        axis: of the channels; None where all have the same values.

    >>> levels = torch.arange(256.0)[None] / 2
    >>> looked_up(torch.tensor([[4, 255]], dtype=torch.uint8), levels, None)
    tensor([[  2.0000, 127.5000]])
    """

    def plain() -> torch.Tensor:
        return _gathered(values, levels, axis)

    def launched(strides: tuple[int, ...]) -> torch.Tensor | None:
        from flatout.kernels.lookup_launch import find_axes, look_up

        axes = find_axes(values.shape, values.stride(), strides, axis)
        if axes is None:
            return None
        out = torch.empty_strided(values.shape, strides, dtype=levels.dtype, device=values.device)
        look_up(values, levels, out, axes)
        return out

    form = ("whole", values.shape, values.stride(), len(levels), levels.dtype, axis)
    return _made(values.device, form, plain, launched)


def windows_looked_up(
    images: torch.Tensor,
    rows: torch.Tensor,
    boxes: torch.Tensor,
    levels: torch.Tensor,
    side: int,
    plain: Callable[[], torch.Tensor],
) -> torch.Tensor:
    """Return a window of each of these rows of images, some mirrored, with its bytes looked up.

    Args:
        images: uint8, count x height x width x channels.
        rows: which images, on their device.
        boxes: a box a row, as `flatout.data.crops.boxes` gives them, on their device.
        levels: a row of 256 values for each channel, on their device.
        side: height and width of the windows.
        plain: makes the same with torch, batch x side x side x channels.
    """

    def launched(strides: tuple[int, ...]) -> torch.Tensor:
        from flatout.kernels.lookup_launch import cut_and_look_up

        shape = (len(rows), side, side, images.shape[-1])
        out = torch.empty_strided(shape, strides, dtype=levels.dtype, device=images.device)
        cut_and_look_up(images, rows, boxes, levels, out)
        return out

    form = ("windows", images.shape, images.stride(), len(rows), side, levels.dtype)
    return _made(images.device, form, plain, launched)


def _made(
    device: torch.device,
    form: tuple[Any, ...],
    plain: Callable[[], torch.Tensor],
    launched: Callable[[tuple[int, ...]], torch.Tensor | None],
) -> torch.Tensor:
    """Return what the kernel makes where it is known to make what torch does."""
    if not _can_launch(device):
        return plain()
    key = (device, form)
    if key not in _KEPT:
        expected = plain()
        _KEPT[key] = expected.stride() if _is_same(expected, launched) else None
        return expected
    strides = _KEPT[key]
    made = None if strides is None else launched(strides)
    return plain() if made is None else made


def _is_same(
    expected: torch.Tensor, launched: Callable[[tuple[int, ...]], torch.Tensor | None]
) -> bool:
    try:
        found = launched(expected.stride())
        return found is not None and torch.equal(_bits(found), _bits(expected))
    except Exception as error:  # noqa: BLE001  whatever Triton raises, torch's way is there
        logging.getLogger(__name__).warning(
            "flatout: pixels are looked up by torch, since the kernel cannot be used: %s", error
        )
        return False


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _can_launch(device: torch.device) -> bool:
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    is_place = device.type == "cuda" or (device.type == "cpu" and interprets)
    return is_place and importlib.util.find_spec("triton") is not None


def _gathered(values: torch.Tensor, levels: torch.Tensor, axis: int | None) -> torch.Tensor:
    places = values.long()
    if axis is not None and len(levels) > 1:
        sides = [1] * values.dim()
        sides[axis] = -1
        places += (torch.arange(len(levels), device=values.device) * LEVELS).view(sides)
    return levels.reshape(-1)[places]
