"""Pixels that stay bytes while arithmetic goes by: 256 levels are followed in place of the image.

Whatever `(x / 255 - mean) / std` makes of an image of bytes, it makes of each of the 256 values a
byte can have, channel by channel. So the operation is applied to these levels with the caller's own
numbers and types, and the image waits as bytes. What comes out is exact by construction: the very
same operation gave it.
"""

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

LEVELS = 256
MAX_CHANNELS = 16
"""A constant with more entries along one axis is a picture of its own, not one per channel."""
MIN_BYTES = 4096
"""Smaller arrays (labels, boxes, masks of a few words) are not worth following."""
Step: TypeAlias = tuple[str, Any, bool]
"""Name of a numpy function, its constant (a number, or one per channel), and whether the constant
comes first. `astype` has a type in place of the constant."""


class UnfollowableError(BaseException):
    """The bytes were used in a way that cannot be followed: make the batch the ordinary way.

    Not an `Exception`, so that a data set which catches those does not take it for its own.
    """


class Grid:
    """What each level became so far. Views of one image share theirs."""

    __slots__ = ("levels", "steps")

    def __init__(self, levels: Any, steps: Sequence[Step] | None) -> None:
        self.levels = levels
        """An array or tensor of 1 or `channels` rows and 256 columns."""
        self.steps = None if steps is None else tuple(steps)
        """How to do the same with numpy; None where only the levels are known."""


class LentGrid(Grid):
    """The levels of a tensor that has its memory from an array."""

    __slots__ = ("lender",)

    def __init__(self, levels: Any, lender: Grid) -> None:
        super().__init__(levels, lender.steps)
        self.lender = lender
        """The levels of the array: as long as others hold them, the array lives."""


class Pixels:
    """An image of bytes and what its values have become."""

    __slots__ = ("axis", "grid", "is_ordered", "store", "view")

    def __init__(
        self,
        values: "np.ndarray[Any, Any]",
        grid: Grid,
        axis: int | None,
        *,
        is_ordered: bool = False,
        store: Any = None,
    ) -> None:
        self.view = values
        """The bytes laid out as the image is."""
        self.grid = grid
        self.axis = axis
        """The axis of the channels, None while all channels are treated alike."""
        self.is_ordered = is_ordered
        """Whether it counts as contiguous though the bytes themselves were not moved."""
        self.store = store
        """The tensor whose memory the bytes are, where there is one."""

    @property
    def is_backwards(self) -> bool:
        """Whether an axis runs backwards through the memory."""
        return any(stride < 0 for stride in self.view.strides)

    def derived(self, grid: Grid, axis: int | None) -> "Pixels":
        """Return the same bytes with another meaning."""
        return Pixels(self.view, grid, axis, is_ordered=self.is_ordered)

    def laid_out(
        self, values: "np.ndarray[Any, Any]", axis: int | None, *, is_ordered: bool = False
    ) -> "Pixels":
        """Return a view of the bytes that means the same."""
        return Pixels(values, self.grid, axis, is_ordered=is_ordered)

    def transposed(self, order: Sequence[int]) -> "Pixels":
        """Return the axes in another order."""
        order = [place % self.view.ndim for place in order]
        axis = None if self.axis is None else order.index(self.axis)
        return self.laid_out(self.view.transpose(order), axis)

    def part(self, key: Any) -> "Pixels | None":
        """Return a rectangle, possibly mirrored or with new axes; None for any other key."""
        keys = key if isinstance(key, tuple) else (key,)
        if not all(item is None or isinstance(item, slice) for item in keys):
            return None
        cuts = [item for item in keys if item is not None]
        if len(cuts) > self.view.ndim:
            return None
        if self.axis is not None and cuts[self.axis : self.axis + 1] not in ([], [slice(None)]):
            return None
        return self.laid_out(self.view[keys], self._axis_after(keys))

    def _axis_after(self, keys: Sequence[Any]) -> int | None:
        """Return where the channels' axis is once an index put new axes before it."""
        if self.axis is None:
            return None
        place = -1
        for number, item in enumerate([*keys, *[slice(None)] * self.view.ndim]):
            place += item is not None
            if place == self.axis:
                return number
        return None

    def ordered(self) -> "Pixels":
        """Return the same as a contiguous copy; the bytes are moved later, on their way out."""
        if self.is_backwards:
            return self.laid_out(contiguous(self.view), self.axis)
        return self.laid_out(self.view, self.axis, is_ordered=True)

    def copied(self) -> "Pixels":
        """Return a copy with a grid of its own."""
        return self.derived(Grid(self.grid.levels, self.grid.steps), self.axis)

    def has_other_views(self) -> bool:
        """Return whether a change in place would show elsewhere."""
        return _references(self, "grid") > _references(_LONE, "lender")


_LONE = LentGrid(None, Grid(None, None))
"""Its lender has no other holder; how many references that is differs between Pythons."""


def _references(holder: Any, name: str) -> int:
    return sys.getrefcount(getattr(holder, name))


def refuse_shared(pixels: Pixels, what: str) -> None:
    """Make sure that no one else sees the memory of an image that may change."""
    lone = _references(_LONE, "lender")
    is_lent = isinstance(pixels.grid, LentGrid) and _references(pixels.grid, "lender") > lone
    if is_lent or pixels.has_other_views():
        raise UnfollowableError(f"an image {what} while a view of it is in use")


class Followed:
    """What stands for a computed image until it is used in a way that is not followed.

    It is computed then, and everything after that is done with the computed image.
    """

    __slots__ = ()
    _pixels: Pixels
    made: Any
    """The image itself, once it was computed for good; None before."""

    @property
    def pixels(self) -> Pixels:
        """The bytes and what became of them."""
        if self.made is not None:
            raise UnfollowableError("a scaled image may have been written to")
        return self._pixels

    @pixels.setter
    def pixels(self, pixels: Pixels) -> None:
        self._pixels = pixels  # type: ignore[misc]  # in the slots of the classes below

    def read(self) -> Any:
        """Return the image for a use that neither writes into it nor hands out its memory."""
        raise NotImplementedError

    def settle(self) -> Any:
        """Compute the image for good and return it.

        Raises:
            UnfollowableError: if others see the same memory, who would not see it change.
        """
        if self.made is None:
            refuse_shared(self._pixels, "is computed")
            self.made = self.read()
        return self.made


def contiguous(values: "np.ndarray[Any, Any]") -> "np.ndarray[Any, Any]":
    """Return a plain array of the same values in the order of its axes.

    An axis that runs backwards is turned round by torch: 7 us for a picture of 224 x 224, where
    numpy took 155 (measured).
    """
    plain = values.view(np.ndarray)
    turned = [axis for axis, stride in enumerate(plain.strides) if stride < 0]
    forward = plain[tuple(slice(None, None, -1 if x in turned else 1) for x in range(plain.ndim))]
    if not turned or plain.dtype != np.uint8 or not forward.flags.c_contiguous:
        return np.ascontiguousarray(plain)
    import torch

    # Torch warns of memory that must not be written to; nothing writes here.
    memory = (ctypes.c_uint8 * forward.size).from_address(forward.ctypes.data)
    with torch._C.DisableTorchFunction():
        source = torch.frombuffer(memory, dtype=torch.uint8).view(forward.shape)
        made: np.ndarray[Any, Any] = source.flip(turned).numpy()
    return made


def follow(values: "np.ndarray[Any, Any]") -> Pixels:
    """Begin to follow an array of bytes; one that might be written to is copied."""
    return Pixels(values, Grid(np.arange(LEVELS, dtype=np.uint8)[None], ()), None)


def can_follow(values: Any) -> bool:
    """Return whether an array is an image of bytes worth following."""
    return bool(values.dtype == np.uint8 and values.ndim >= 2 and values.size >= MIN_BYTES)


def column(constant: Any, pixels: Pixels) -> tuple[Any, int | None] | None:
    """Return a constant as one row per channel, and the axis of the channels.

    None where it varies along anything but one short axis. Numbers stay as they are: their type
    decides the type of the result.
    """
    shape = getattr(constant, "shape", None)
    if shape is None or len(shape) == 0:
        return constant, pixels.axis
    sides = (1,) * (pixels.view.ndim - len(shape)) + tuple(shape)
    long = [place for place, side in enumerate(sides) if side != 1]
    if len(sides) > pixels.view.ndim or len(long) > 1:
        return None
    if not long:
        return constant.reshape(1, 1), pixels.axis
    place = long[0]
    is_per_channel = sides[place] == pixels.view.shape[place] <= MAX_CHANNELS
    if not is_per_channel or pixels.axis not in (None, place):
        return None
    return constant.reshape(-1, 1), place


def planes(values: Any, axis: int | None) -> list[Any]:
    """Return an array or tensor channel by channel, as views."""
    if axis is None:
        return [values]
    before = (slice(None),) * axis
    places = [(*before, channel) for channel in range(values.shape[axis])]
    return [values[place] for place in places]
