"""CUDA streams of the script's own, which do not wait for what techniques do.

A prefetcher by hand (`with torch.cuda.stream(side): x = x.cuda(non_blocking=True)`) that is given a
batch on the device copies nothing, and its stream reads what another stream may still be writing.
Such a script keeps the copies to itself: batches are handed out on the CPU from then on.
"""

import functools
import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

from flatout.agent import patching
from flatout.agent.nested import leaves_of
from flatout.records.errors import NotApplicable

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


def check() -> None:
    """Make sure that whoever uses a batch waits for what makes it on the device."""
    if _SEEN:
        raise NotApplicable(REASON)


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
    import torch

    if not _SEEN:
        _GIVEN[:] = [reference for reference in _GIVEN if reference() is not None]
        _GIVEN.extend(
            weakref.ref(leaf)
            for leaf in leaves_of(batch)
            if isinstance(leaf, torch.Tensor) and leaf.device.type != "cpu"
        )
        del _GIVEN[:-MOST_GIVEN]
    return batch


def _notice(place: Any, name: str) -> None:
    if not hasattr(getattr(place, name), MARK):
        patching.wrap(place, name, _noticing)


def _noticing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if not _SEEN and _is_of_script(sys._getframe(1)):
            (first,) = (*args, *kwargs.values())[:1] or (None,)
            _look_at(getattr(first, "stream", first))
        return original(*args, **kwargs)

    setattr(entered, MARK, True)
    return entered


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
