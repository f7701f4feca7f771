"""Tell whether what is followed has memory in common with what somebody else holds."""

import sys
from typing import Any

import numpy as np

from flatout.data.levels import Grid, Pixels, UnfollowableError

HARMLESS = (str, bytes, float, complex, type(None), type, np.generic, np.dtype)
"""Kinds of results that lead to no memory."""
KINDS_OF_TORCH = frozenset({"dtype", "device", "layout", "memory_format"})
"""The same of torch's, which is not imported here."""


class LentGrid(Grid):
    """The levels of a tensor that has its memory from an array."""

    __slots__ = ("lender",)

    def __init__(self, levels: Any, lender: Grid) -> None:
        super().__init__(levels, lender.steps)
        self.lender = lender
        """The levels of the array: as long as others hold them, the array lives."""


class Keeping:
    """What stands for a computed image until somebody may see that image's own memory.

    Once somebody was given a part of it, or wrote into it, it is kept, and all that follows is done
    with it.
    """

    __slots__ = ()
    _pixels: Pixels
    made: Any
    """The image itself, once it is kept; None before."""

    @property
    def pixels(self) -> Pixels:
        """The bytes and what became of them.

        Raises:
            UnfollowableError: if the image was kept, which may say something else by now.
        """
        if self.made is not None:
            raise UnfollowableError("a scaled image may have been written to")
        return self._pixels

    @pixels.setter
    def pixels(self, pixels: Pixels) -> None:
        self._pixels = pixels  # type: ignore[misc]  # in the slots of the classes below

    def keep(self, made: Any) -> Any:
        """Use a computed image in place of the bytes from now on, and return it.

        Raises:
            UnfollowableError: if others see the same memory, who would not see it change.
        """
        if self.made is None:
            refuse_shared(self._pixels, "is computed")
            self.made = made
        return self.made


def refuse_shared(pixels: Pixels, what: str) -> None:
    """Make sure that nobody else sees the memory of an image that may change.

    Args:
        pixels: the image.
        what: what happens to the image, as in "is changed in place".

    Raises:
        UnfollowableError: if somebody does, who would not see the change.
    """
    lender = getattr(pixels.grid, "lender", None)
    # The lender is counted here, in the attribute and as the argument.
    is_lent = lender is not None and sys.getrefcount(lender) > 3
    if is_lent or pixels.has_other_views():
        raise UnfollowableError(f"an image {what} while a view of it is in use")


def shares_memory(found: Any, made: "np.ndarray[Any, Any]") -> bool:
    """Tell whether what a function returned leads to the memory of an array without gaps.

    >>> values = np.zeros((4, 4))
    >>> shares_memory(values[1], values), shares_memory(values.sum(0), values)
    (True, False)
    """
    return leads_to(found, made.ctypes.data, made.nbytes)


def leads_to(found: Any, start: int, length: int) -> bool:
    """Tell whether a result leads to memory, given by its address and length in bytes.

    Of what is not known it is taken for granted.
    """
    if isinstance(found, int):
        return start <= found < start + length
    if isinstance(found, HARMLESS) or type(found).__name__ in KINDS_OF_TORCH:
        return False
    if isinstance(found, list | tuple):
        # Numbers, in lists of lists, are many and lead nowhere.
        is_numbers = isinstance(found, list) and bool(found) and _is_number(found[0])
        return not is_numbers and any(leads_to(part, start, length) for part in found)
    try:
        place = found.ctypes.data if isinstance(found, np.ndarray) else found.data_ptr()
    except (AttributeError, RuntimeError):
        return True
    return bool(start <= place < start + length)


def _is_number(value: Any) -> bool:
    while isinstance(value, list) and value:
        value = value[0]
    return isinstance(value, int | float | complex)
