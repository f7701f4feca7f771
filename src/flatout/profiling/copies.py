"""Times copies between host and device where the script asks for them: `to`, `cuda`, `copy_`.

A copy to the device is timed on the host: a pageable one blocks until it is done, one with
`non_blocking` from pinned memory only until it is queued. A copy to the host blocks until the
device has caught up. `item` and its kin are left alone: wrapped, `torch.compile` could no longer
capture them. What is compiled is not timed. Not measured on a GPU yet.
"""

import functools
import time
from collections.abc import Callable
from typing import Any

COPYING = ("to", "cuda", "cpu")
TO_DEVICE, FROM_DEVICE = "h2d", "sync"

Saw = Callable[[str, float, float, Any], None]
"""Called with `TO_DEVICE` or `FROM_DEVICE`, the moment the call began, the moment it ended, and the
tensor that was copied. It must not raise."""


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
        kind.copy_ = self._filling(kind.copy_)

    def _note(self, began: float, source: Any, target: Any) -> None:
        """Tell of a copy that left the host or came to it."""
        was_on_host = getattr(source, "is_cpu", None)  # not every source is a tensor
        if was_on_host is not None and getattr(target, "is_cpu", was_on_host) is not was_on_host:
            way = TO_DEVICE if was_on_host else FROM_DEVICE
            self.saw(way, began, time.perf_counter(), source)

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
        def filled(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, *args, **kwargs)
            self.calls += 1
            began = time.perf_counter()
            result = original(tensor, *args, **kwargs)
            self._note(began, args[0] if args else kwargs.get("other"), tensor)
            return result

        return filled
