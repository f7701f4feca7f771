"""Call a model and leave no trace: random streams and buffers are put back."""

import functools
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@contextmanager
def streams_kept() -> Iterator[None]:
    """Set the random streams of this process back at the end, those of its GPUs too."""
    before = [(put, read()) for read, put in _streams().values()]
    try:
        yield
    finally:
        for put, state in before:
            put(state)


def stream_states() -> dict[str, Any]:
    """Return the states of the random streams of this process, by name."""
    return {name: read() for name, (read, _) in _streams().items()}


def _streams() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how to read and how to set the streams, by name."""
    import torch

    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "random": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if "numpy.random" in sys.modules:
        numpy = sys.modules["numpy.random"]
        # The other form is for one kind of generator alone.
        found["numpy.random"] = functools.partial(numpy.get_state, legacy=False), numpy.set_state
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch.cuda"] = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    return found


@contextmanager
def buffers_kept(module: "torch.nn.Module") -> Iterator[None]:
    """Put the module's buffers back at the end, those too that were replaced by others."""
    before = [
        (owner, name, buffer, buffer.detach().clone())
        for owner in module.modules()
        for name, buffer in owner.named_buffers(recurse=False)
    ]
    try:
        yield
    finally:
        for owner, name, buffer, value in before:
            if owner._buffers.get(name) is not buffer:
                owner._buffers[name] = buffer
            if buffer.shape == value.shape:
                # Past autograd: batch norm saved its statistics for a backward that never reads
                # them.
                buffer.data.copy_(value)
