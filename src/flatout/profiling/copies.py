"""Times copies between host and device where the script asks for them: `to`, `cuda`, `item`, ...

A copy to the device is timed on the host: a pageable one blocks until it is done, one with
`non_blocking` from pinned memory only until it is queued. Reading a device's value (`item`,
`tolist`, `cpu`) blocks until the device has caught up: that is the host waiting. Under
`torch.compile` nothing is timed. Not measured on a GPU yet.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

COPYING = ("to", "cuda", "cpu")
READING = ("item", "tolist", "__bool__", "__float__", "__int__")
"""Methods that return a Python value: on a device's tensor they wait for the device."""

TO_DEVICE, FROM_DEVICE = "h2d", "sync"

Saw = Callable[[str, float, float, int], None]
"""Called with `TO_DEVICE` or `FROM_DEVICE`, the moment the call began, the moment it ended, and the
bytes that were copied."""


class CopyTimer:
    """Wraps the methods of `torch.Tensor` that copy; torch's own class, so every tensor's."""

    def __init__(self, saw: Saw) -> None:
        self.saw = saw
        self.calls = 0
        """Calls of the wrapped methods, copies or not: what they cost is told."""

    def install(self) -> None:
        """Time the copies of this process from now on."""
        import torch

        self.is_compiling = torch.compiler.is_compiling
        kind: Any = torch.Tensor
        for name in COPYING:
            setattr(kind, name, self._copying(getattr(kind, name)))
        for name in READING:
            setattr(kind, name, self._reading(getattr(kind, name)))
        kind.copy_ = self._filling(kind.copy_)

    def _note(self, began: float, source: Any, target: Any) -> None:
        """Tell of a copy that left the host or came to it."""
        was_on_host = source.is_cpu
        if target.is_cpu is not was_on_host:
            way = TO_DEVICE if was_on_host else FROM_DEVICE
            size = source.numel() * source.element_size()
            self.saw(way, began, time.perf_counter(), size)

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that returns the tensor elsewhere."""
        is_compiling = self.is_compiling

        @functools.wraps(original)
        def copied(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, *args, **kwargs)
            self.calls += 1
            began = time.perf_counter()
            result = original(tensor, *args, **kwargs)
            self._note(began, tensor, result)
            return result

        return copied

    def _filling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `copy_`, which fills a tensor from another."""
        is_compiling = self.is_compiling

        @functools.wraps(original)
        def filled(tensor: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, source, *args, **kwargs)
            self.calls += 1
            began = time.perf_counter()
            result = original(tensor, source, *args, **kwargs)
            self._note(began, source, tensor)
            return result

        return filled

    def _reading(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that gives a Python value."""
        is_compiling = self.is_compiling

        @functools.wraps(original)
        def read(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, *args, **kwargs)
            self.calls += 1
            if tensor.is_cpu:
                return original(tensor, *args, **kwargs)
            began = time.perf_counter()
            result = original(tensor, *args, **kwargs)
            self.saw(FROM_DEVICE, began, time.perf_counter(), tensor.element_size())
            return result

        return read
