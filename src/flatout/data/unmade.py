"""Bytes of pictures that are still to be made: their shape is known, their memory is untouched."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from flatout.data.scaling import CHANNELS, Cut, scaled

Order: TypeAlias = tuple[int, ...]


class Unmade:
    """Pictures whose windows are there, and memory for what they are scaled to.

    Views of that memory are laid out as the script asks; whoever reads one has the bytes made.
    """

    __slots__ = ("cuts", "is_made", "order", "room", "windows")
    early: ClassVar[int] = 0
    """Single pictures of this process that somebody needed before their batch was scaled."""

    def __init__(self, windows: Any, cuts: Sequence[Cut], order: Order | None = None) -> None:
        self.windows = windows
        """uint8, the windows' pixels one after the other, as a tensor or an array."""
        self.cuts = tuple(cuts)
        self.order = order
        """Of a batch: the places of height, width and channel in the order of its axes. None for
        one picture, which has no axis of a batch."""
        self.room = np.empty(self._sides(), np.uint8)
        self.is_made = False

    def _sides(self) -> tuple[int, ...]:
        width, height = self.cuts[0].size
        picture = (height, width, CHANNELS)
        if self.order is None:
            return picture
        return (len(self.cuts), *(picture[place] for place in self.order))

    def make(self) -> None:
        """Scale the pictures, into the memory that all views are of."""
        if self.is_made:
            return
        self.is_made = True
        Unmade.early += self.order is None
        with torch._C.DisableTorchFunction():
            values = self.windows
            is_array = not isinstance(values, torch.Tensor)
            # Torch warns of memory that must not be written to: a copy, since few are made here.
            pixels = torch.from_numpy(values.copy()) if is_array else values
            self.room[...] = laid_out(scaled(pixels.view(-1, CHANNELS), self.cuts), self.order)

    def is_whole_batch(self, view: "np.ndarray[Any, Any]") -> bool:
        """Tell whether a view is that of a whole batch as it is, of which nobody saw a byte."""
        is_one = self.order is None or self.is_made
        return not is_one and self.layout_of(view) == (tuple(range(self.room.ndim)), frozenset())

    def layout_of(self, view: "np.ndarray[Any, Any]") -> tuple[Order, frozenset[int]] | None:
        """Return in which order a view has the axes, and which run backwards.

        None where it is not all of the memory, or runs backwards over the channels.
        """
        room = self.room
        axes = list(zip(room.strides, room.shape, strict=True))
        order, turned, first = [], set(), room.ctypes.data
        for stride, side in zip(view.strides, view.shape, strict=True):
            if (abs(stride), side) not in axes:
                return None
            place = axes.index((abs(stride), side))
            order.append(place)
            if stride < 0:
                turned.add(place)
                first += (side - 1) * -stride
        is_whole = sorted(order) == list(range(room.ndim)) and view.ctypes.data == first
        is_possible = room.ndim - 1 not in turned
        return (tuple(order), frozenset(turned)) if is_whole and is_possible else None

    def cut_of(self, turned: frozenset[int]) -> Cut:
        """Return how the only picture is made, with some axes turned round."""
        (cut,) = self.cuts
        height, width = 0, 1
        return replace(
            cut,
            is_mirrored=cut.is_mirrored ^ (width in turned),
            is_upside_down=cut.is_upside_down ^ (height in turned),
        )


@contextmanager
def looked_at_only() -> Iterator[None]:
    """Do not count pictures that a proof of ours has made."""
    before = Unmade.early
    try:
        yield
    finally:
        Unmade.early = before


def laid_out(pictures: torch.Tensor, order: Order | None) -> torch.Tensor:
    """Return pictures with their axes in another order, contiguous; or the only one.

    Args:
        pictures: (pictures, height, width, channels).
        order: see `Unmade.order`.
    """
    if order is None:
        return pictures[0]
    return pictures.permute(0, *(place + 1 for place in order)).contiguous()
