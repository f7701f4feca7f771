"""Memory that is shared, and CUDA streams of the script's own: what techniques must not disturb.

Streams of the script do not wait for what techniques do.

A prefetcher by hand (`with torch.cuda.stream(side): x = x.cuda(non_blocking=True)`) that is given a
batch on the device copies nothing, and its stream reads what another stream may still be writing.
Such a script keeps the copies to itself: batches are handed out on the CPU from then on.

Whether what is followed has memory in common with what someone else holds.
"""

import functools
import sys
import weakref
from types import FrameType
from typing import Any

import numpy as np

from flatout.agent.nested import map_leaves
from flatout.data.byte_batches.levels import Grid, Pixels, UnfollowableError

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
    """What stands for a computed image until someone may see that image's own memory.

    Once someone was given a part of it, or wrote into it, it is kept, and all that follows is done
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
    """Make sure that no one else sees the memory of an image that may change.

    Args:
        pixels: the image.
        what: what happens to the image, as in "is changed in place".

    Raises:
        UnfollowableError: if someone does, who would not see the change.
    """
    lender = getattr(pixels.grid, "lender", None)
    # The lender is counted here, in the attribute and as the argument.
    is_lent = lender is not None and sys.getrefcount(lender) > 3
    if is_lent or pixels.has_other_views():
        raise UnfollowableError(f"an image {what} while a view of it is in use")


def shares_memory(found: Any, made: "np.ndarray[Any, Any]") -> bool:
    """Return whether what a function returned leads to the memory of an array without gaps.

    >>> values = np.zeros((4, 4))
    >>> shares_memory(values[1], values), shares_memory(values.sum(0), values)
    (True, False)
    """
    return leads_to(found, made.ctypes.data, made.nbytes)


def leads_to(found: Any, start: int, length: int) -> bool:
    """Return whether a result leads to memory, given by its address and length in bytes.

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


REASON = (
    "the script enters CUDA streams of its own, which do not wait for batches that are made on the "
    "device ahead of them"
)
NOT_THE_SCRIPT = frozenset({"flatout", "torch"})
"""Packages that wait for each other's streams where they enter one."""
PASSED_OVER = "contextlib"
"""The module that enters for whoever called it."""
MOST_GIVEN = 64
"""Tensors that are remembered: what was given before them was written long ago."""
MARK = "_flatout_noticed"
"""On what notices already."""

_SEEN: list[str] = []
"""`REASON`, once the script entered a stream."""
_GIVEN: list["weakref.ref[Any]"] = []
"""Tensors on a device that were handed out before."""


def reason() -> str:
    """Return why batches are not made on the device; empty as long as they may be."""
    return _SEEN[0] if _SEEN else ""


def watch() -> None:
    """Notice from now on when the script enters a stream."""
    import torch

    _notice(torch.cuda.StreamContext, "__enter__")
    _notice(torch.cuda, "set_stream")
    if hasattr(torch.cuda.Stream, "__enter__"):  # `with stream:`, of newer torch
        _notice(torch.cuda.Stream, "__enter__")


def given(batch: Any) -> Any:
    """Return a batch that is about to be handed out, its tensors on a device remembered.

    The first stream that the script enters has to wait for them.
    """
    if not _SEEN:
        _GIVEN[:] = [reference for reference in _GIVEN if reference() is not None]
        map_leaves(batch, _remembered)
        del _GIVEN[:-MOST_GIVEN]
    return batch


def _remembered(leaf: Any) -> Any:
    import torch

    if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu":
        _GIVEN.append(weakref.ref(leaf))
    return leaf


def _notice(place: Any, name: str) -> None:
    original = getattr(place, name)
    if hasattr(original, MARK):
        return

    @functools.wraps(original)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if not _SEEN and _is_of_script(sys._getframe(1)):
            (first,) = (*args, *kwargs.values())[:1] or (None,)
            _look_at(getattr(first, "stream", first))
        return original(*args, **kwargs)

    setattr(entered, MARK, True)
    setattr(place, name, entered)


def _is_of_script(frame: FrameType | None) -> bool:
    """Return whether this frame, or the one for which it enters a stream, is the script's."""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if name != PASSED_OVER:
            return name.partition(".")[0] not in NOT_THE_SCRIPT
        frame = frame.f_back
    return True


def _look_at(stream: Any) -> None:
    """Note that the script enters this stream, and let it wait for what was given before."""
    import torch

    if stream is None or stream == torch.cuda.current_stream(stream.device):
        return
    _SEEN.append(REASON)
    alive = [tensor for reference in _GIVEN if (tensor := reference()) is not None]
    _GIVEN.clear()
    for device in {tensor.device for tensor in alive}:
        torch.cuda.synchronize(device)
    for tensor in alive:
        # Its memory is another stream's: without the record that one might have it back too early.
        tensor.record_stream(stream)
