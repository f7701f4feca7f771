"""How the lookup of bytes is run: which axes go together, and over how many programs.

Needs Triton; `flatout.kernels.lookup` decides when it is used. Triton's interpreter
(`TRITON_INTERPRET=1`) runs the same kernel on the CPU. Not measured on a GPU yet.
"""

import math
from collections.abc import Sequence
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
    """One axis of the result, or several that lie in memory like one."""

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
    """Tell whether two neighbours are one axis in memory."""
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
        boxes: int64, a box a row, as `flatout.data.crops.boxes` gives them.
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
