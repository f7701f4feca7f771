"""Stack followed images of one batch into one array of bytes that means the same."""

from collections.abc import Sequence
from typing import Any

import torch

from flatout.data.levels import Grid, Pixels
from flatout.data.packed import shared_bytes
from flatout.data.scaling import CHANNELS
from flatout.data.unmade import Unmade

PICTURE_DIMS = 3


def stacked(images: Sequence[Pixels]) -> Pixels | None:
    """Return the batch, in shared memory where this is a worker; None where they differ."""
    first = images[0]
    axes = {image.axis for image in images if image.axis is not None}
    if len(axes) > 1 or not all(means_the_same(first, image) for image in images[1:]):
        return None
    if first.view.ndim != PICTURE_DIMS and any(image.grid.colours for image in images):
        return None
    axis = axes.pop() + 1 if axes else None
    grid = Grid(first.grid.levels, first.grid.steps, _all_colours(images))
    unmade = _unmade(images)
    if unmade is not None:
        return Pixels(unmade.room, grid, axis, unmade=unmade)
    store = shared_bytes((len(images), *first.view.shape))
    values = store.numpy()
    for place, image in zip(values, images, strict=True):
        place[...] = image.bytes
    return Pixels(values, grid, axis, store=store)


def _unmade(images: Sequence[Pixels]) -> Unmade | None:
    """Return the batch still to be scaled, if all of it is; its windows in shared memory."""
    parts = [image.unmade for image in images]
    if any(part is None or part.is_made for part in parts):
        return None
    layouts = [part.layout_of(image.view) for part, image in zip(parts, images, strict=True)]
    if len({layout and layout[0] for layout in layouts}) > 1 or None in layouts:
        return None
    order = layouts[0][0]
    cuts = [part.cut_of(turned) for part, (_, turned) in zip(parts, layouts, strict=True)]
    store = shared_bytes((CHANNELS * sum(cut.pixels for cut in cuts),))
    values, start = store.numpy(), 0
    for part in parts:
        window = part.windows.reshape(-1)
        values[start : start + window.size] = window
        start += window.size
    return Unmade(store, cuts, order)


def means_the_same(one: Pixels, other: Pixels) -> bool:
    """Tell whether two images of the same shape had the same done to them."""
    ours, theirs = one.grid.levels, other.grid.levels
    if one.view.shape != other.view.shape:
        return False
    # Of an image whose channels are treated alike, the axis need not be known.
    is_open = None in (one.axis, other.axis) and len(ours) == len(theirs) == 1
    if one.axis != other.axis and not is_open:
        return False
    with torch._C.DisableTorchFunction():
        return ours.dtype == theirs.dtype and (ours is theirs or _bits(ours) == _bits(theirs))


def _all_colours(images: Sequence[Pixels]) -> list[Any]:
    """Return what is to be done to each image of a batch; nothing where it is nothing for all."""
    if not any(image.grid.colours for image in images):
        return []
    return [image.grid.colours[0] if image.grid.colours else () for image in images]


def _bits(levels: torch.Tensor) -> bytes:
    return bytes(levels.contiguous().view(torch.uint8).numpy().data)
