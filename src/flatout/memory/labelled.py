"""Tensors of a class of the script's own, as libraries of pictures have them, while they are fake.

Such a class adds names and metadata and leaves the computing to torch. Fake tensors refuse it, and
`as_subclass`, with which it marks what torch returns, cannot mark one that is already of a class.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from flatout.memory.swapping import swapped

COMPUTED_BY_TORCH = Tensor.__torch_dispatch__


def _is_labelled(kind: Any) -> bool:
    """Tell whether a class of tensors is the script's own, and computes as torch's does."""
    own = issubclass(kind, Tensor) and kind not in (Tensor, nn.Parameter)
    return own and kind.__torch_dispatch__ is COMPUTED_BY_TORCH


def without_label(value: Any) -> Any:
    """Return a value with the tensors in it as plain ones, which share their memory."""
    if isinstance(value, tuple | list):
        return type(value)(map(without_label, value))
    if isinstance(value, Tensor) and _is_labelled(type(value)):
        return _as_subclass(value, Tensor)
    return value


@contextlib.contextmanager
def labels_stay() -> Iterator[None]:
    """Let fake tensors take the class of the script's own that it gives them while this runs."""
    with swapped(Tensor, "as_subclass", _labelled):
        yield


_as_subclass: Callable[[Tensor, type], Any] = Tensor.as_subclass


def _labelled(tensor: Tensor, cls: Any) -> Any:
    """Return the tensor as one of this class, still fake where it is."""
    if not isinstance(tensor, FakeTensor):
        return _as_subclass(tensor, cls)
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.ops.aten.alias(tensor)
    if not issubclass(cls, FakeTensor):
        cls = FakeTensor if cls is Tensor else _fake_of(cls)
    made.__class__ = cls
    return made


@functools.cache
def _fake_of(kind: Any) -> type:
    """Return the class of fake tensors that have this class's methods, under its name."""
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    made: type = type(kind)(kind.__name__, (FakeTensor, kind), names)
    return made
