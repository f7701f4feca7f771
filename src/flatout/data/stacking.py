"""Stack followed images of one batch into one array of bytes that means the same."""

from collections.abc import Sequence

import torch

from flatout.data.levels import Grid, Pixels
from flatout.data.packed import shared_bytes


def stacked(images: Sequence[Pixels]) -> Pixels | None:
    """Return the batch, in shared memory where this is a worker; None where they differ."""
    first = images[0]
    axes = {image.axis for image in images if image.axis is not None}
    if len(axes) > 1 or not all(means_the_same(first, image) for image in images[1:]):
        return None
    axis = axes.pop() + 1 if axes else None
    grid = Grid(first.grid.levels, first.grid.steps)
    store = shared_bytes((len(images), *first.view.shape))
    values = store.numpy()
    for place, image in zip(values, images, strict=True):
        place[...] = image.view
    return Pixels(values, grid, axis, store=store)


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


def _bits(levels: torch.Tensor) -> bytes:
    return bytes(levels.contiguous().view(torch.uint8).numpy().data)
