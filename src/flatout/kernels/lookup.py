"""Bytes to the values that a table has for them, in one kernel where there is a GPU with Triton.

Torch's own way makes an index of eight bytes for each byte, adds to it and gathers: three trips
through memory. `flatout.kernels.lookup` reads each byte and writes its value, and cuts
windows out of pictures and mirrors them while it is at it. What it gives is the table's own values;
the first batch of each form is made both ways, and torch's way stays wherever they differ in a bit
or a stride. Not measured on a GPU yet.

How the lookup of bytes is run: which axes go together, and over how many programs.

Needs Triton; `flatout.kernels.lookup` decides when it is used. Triton's interpreter
(`TRITON_INTERPRET=1`) runs the same kernel on the CPU. Not measured on a GPU yet.
"""

import importlib.util
import logging
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from flatout.kernels.gemm_launch import on_device
from flatout.kernels.lookup_triton import lookup_kernel

LEVELS = 256
BLOCK = 1024
"""Values of one program: eight for each thread of four warps."""
INNER_AXES = 3
MOST_INNER = 2**31 - 2 * BLOCK
"""Places inside of one n are counted in 32 bits."""
WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size: how a value is moved, bit by bit."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the result, or several that are in memory like one."""

    size: int
    source: int
    """Stride in the source."""
    out: int
    is_channel: bool


def find_axes(
    shape: Sequence[int], source: Sequence[int], out: Sequence[int], channel: int | None
) -> list[Axis] | None:
    """Return n and three axes inside of it, in the result's order; None where they are more.

    >>> [axis.size for axis in find_axes((8, 3, 5, 7), (105, 35, 7, 1), (105, 35, 7, 1), 1)]
    [8, 1, 3, 35]
    """
    sides = zip(shape, source, out, strict=True)
    whole = [Axis(*side, place == channel) for place, side in enumerate(sides)]
    axes = [axis for axis in whole if axis.size != 1]
    axes.sort(key=lambda axis: -axis.out)  # stable: equal strides keep their order
    if len(axes) < 1 + INNER_AXES:
        axes.insert(0, Axis(1, 0, 0, is_channel=False))
    inner: list[Axis] = []
    for axis in axes[1:]:
        last = inner[-1] if inner else None
        if last is not None and _is_one(last, axis):
            inner[-1] = Axis(last.size * axis.size, axis.source, axis.out, is_channel=False)
        else:
            inner.append(axis)
    if len(inner) > INNER_AXES or math.prod(axis.size for axis in inner) > MOST_INNER:
        return None
    filling = [Axis(1, 0, 0, is_channel=False)] * (INNER_AXES - len(inner))
    return [axes[0], *filling, *inner]


def _is_one(last: Axis, axis: Axis) -> bool:
    """Return whether two neighbours are one axis in memory."""
    is_dense = last.source == axis.source * axis.size and last.out == axis.out * axis.size
    return is_dense and not last.is_channel and not axis.is_channel


def look_up(
    values: torch.Tensor, levels: torch.Tensor, out: torch.Tensor, axes: Sequence[Axis]
) -> None:
    """Write the value of each byte.

    Args:
        values: uint8, any strides.
        levels: a row of 256 values for each channel, or one row.
        out: of the shape of `values` and the type of `levels`.
        axes: what `find_axes` gave.
    """
    channels = [place for place, axis in enumerate(axes) if axis.is_channel]
    channel = channels[0] if channels and len(levels) > 1 else -1
    table = levels.reshape(-1)
    _launch(values, None, table, out, axes, channel)


def cut_and_look_up(
    images: torch.Tensor,
    rows: torch.Tensor,
    boxes: torch.Tensor,
    levels: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Write the value of each byte of a window of each of these rows, some mirrored.

    Args:
        images: uint8, count x height x width x channels, any strides.
        rows: int64, which images.
        boxes: int64, a box a row, as `flatout.data.random_crops.boxes` gives them.
        levels: a row of 256 values for each channel.
        out: batch x side x side x channels.
    """
    axes = [
        Axis(size, source, step, place == 3)
        for place, (size, source, step) in enumerate(
            zip(out.shape, images.stride(), out.stride(), strict=True)
        )
    ]
    _launch(images, (rows.contiguous(), boxes.contiguous()), levels.reshape(-1), out, axes, 3)


def _launch(
    source: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor] | None,
    table: torch.Tensor,
    out: torch.Tensor,
    axes: Sequence[Axis],
    channel: int,
) -> None:
    if not out.numel():
        return
    kind = WHOLE_NUMBERS[out.element_size()]
    rows, boxes = where or (source, source)  # never read without boxes
    count, _, count_j, count_k = (axis.size for axis in axes)
    inner = out.numel() // count
    block = min(BLOCK, triton.next_power_of_2(inner))
    blocks = triton.cdiv(inner, block)
    known: dict[str, Any] = {"CHANNEL": channel, "HAS_BOXES": where is not None, "LEVELS": LEVELS}
    columns = {"COLUMNS": 0, "TOP": 0, "LEFT": 0, "FLIP": 0}
    if where is not None:
        columns = {"COLUMNS": boxes.shape[1], "TOP": 0, "LEFT": 1, "FLIP": boxes.shape[1] - 1}
    with on_device(out.device):
        lookup_kernel[count * blocks,](
            source,
            rows,
            boxes,
            table.view(kind),
            out.view(kind),
            count_j,
            count_k,
            inner,
            blocks,
            *(axis.source for axis in axes),
            *(axis.out for axis in axes),
            count_j - 1,
            **known,
            **columns,
            BLOCK=block,
        )


_KEPT: dict[Any, bool] = {}
"""Of each form of a batch whether the kernel gives what torch gives, strides included. Sizes are no
part of a form: batches differ in them."""
_FAILED: set[torch.device] = set()
"""Devices on which Triton failed; not tried there again."""


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

    def launched() -> torch.Tensor | None:

        out = torch.empty_like(values, dtype=levels.dtype)
        axes = find_axes(values.shape, values.stride(), out.stride(), axis)
        if axes is not None:
            look_up(values, levels, out, axes)
        return None if axes is None else out

    form = ("whole", *_layout(values), len(levels), levels.dtype, axis)
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
        boxes: a box a row, as `flatout.data.random_crops.boxes` gives them, on their device.
        levels: a row of 256 values for each channel, on their device.
        side: height and width of the windows.
        plain: makes the same with torch, batch x side x side x channels.
    """

    def launched() -> torch.Tensor:

        shape = (len(rows), side, side, images.shape[-1])
        out = torch.empty(shape, dtype=levels.dtype, device=images.device)
        cut_and_look_up(images, rows, boxes, levels, out)
        return out

    form = ("windows", *_layout(images), images.shape[-1], side == 1, len(rows) == 1, levels.dtype)
    return _made(images.device, form, plain, launched)


def _layout(values: torch.Tensor) -> tuple[Any, ...]:
    """Return what torch goes by when it lays out a result: order of the axes, gaps between them.

    >>> pictures = torch.empty(8, 3, 5, 7, dtype=torch.uint8)
    >>> _layout(pictures) == _layout(pictures[:4]), _layout(pictures) == _layout(pictures[..., 1:])
    (True, False)
    """
    sides = zip(values.stride(), range(values.dim()), values.shape, strict=True)
    inner, found = 1, []
    for stride, place, size in sorted(side for side in sides if side[2] != 1):
        found.append((place, stride == inner, stride == 0))
        inner = stride * size
    return values.dim(), tuple(found)


def _made(
    device: torch.device,
    form: tuple[Any, ...],
    plain: Callable[[], torch.Tensor],
    launched: Callable[[], torch.Tensor | None],
) -> torch.Tensor:
    """Return what the kernel makes where it is known to make what torch does."""
    key = (device, form)
    is_kept = _KEPT.get(key)
    if not _can_launch(device) or is_kept is False:
        return plain()
    if is_kept is None and _is_capturing(device):
        return plain()  # comparing waits for the device, which no graph can hold
    found = _launched(device, launched)
    if found is None or is_kept:
        return plain() if found is None else found
    expected = plain()
    is_same = found.stride() == expected.stride()
    _KEPT[key] = is_same and torch.equal(_bits(found), _bits(expected))
    return expected


def _launched(
    device: torch.device, launched: Callable[[], torch.Tensor | None]
) -> torch.Tensor | None:
    try:
        return launched()
    except torch.OutOfMemoryError:
        raise  # torch's way needs more
    except Exception as error:  # noqa: BLE001  whatever Triton raises, torch's way is there
        _FAILED.add(device)
        logging.getLogger(__name__).warning(
            "flatout: pixels are looked up by torch, since the kernel cannot be used: %s", error
        )
        return None


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.uint8)


def _can_launch(device: torch.device) -> bool:
    interprets = os.environ.get("TRITON_INTERPRET") == "1"
    is_place = device.type == "cuda" or (device.type == "cpu" and interprets)
    return is_place and device not in _FAILED and _has_triton()


def _has_triton() -> bool:
    try:
        return importlib.util.find_spec("triton") is not None
    except ValueError:  # a module of that name that was put together by hand
        return False


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _gathered(values: torch.Tensor, levels: torch.Tensor, axis: int | None) -> torch.Tensor:
    places = values.long()
    if axis is not None and len(levels) > 1:
        sides = [1] * values.dim()
        sides[axis] = -1
        places += (torch.arange(len(levels), device=values.device) * LEVELS).view(sides)
    return levels.reshape(-1)[places]
