"""Clocks in the training process: around operators, copies and Python's garbage collector."""

import functools
import gc
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils import _python_dispatch

from flatout.agent import patching
from flatout.agent.events import Listener
from flatout.agent.session import Session

ATTRIBUTE = "_flatout_operators"


Mode: Any = _python_dispatch.TorchDispatchMode


class Operators(Mode):  # type: ignore[misc]  # torch does not type its modes
    """Call the listeners around every operator, in every thread that torch takes it to.

    One dispatch mode for all probes of a pass. It changes no argument and no result, but it makes
    torch.compile run eagerly without a word; so it is never entered where something was compiled.
    """

    supports_higher_order_operators = True  # flex_attention refuses modes that do not say so

    def __init__(self, session: Session) -> None:
        super().__init__()
        self.session = session
        self.before: list[Listener] = []
        self.after: list[Listener] = []
        self.is_on = False
        self.is_entered = False

    def __torch_dispatch__(
        self,
        operator: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run the operator between the listeners; one that fails is recorded and left out."""
        if not self.is_on:
            return operator(*args, **(kwargs or {}))
        self.tell(self.before, operator, args)
        result = operator(*args, **(kwargs or {}))
        self.tell(self.after, operator, result)
        return result

    def tell(self, listeners: list[Listener], operator: Any, what: Any) -> None:
        """Call the listeners: quiet ones, see `Session.quietly`."""
        for listener in listeners:
            listener(operator, what)

    def enter(self) -> None:
        """Begin to listen. Once: whoever comes second finds the mode running."""
        self.is_on = True
        if not self.is_entered:
            self.is_entered = True
            self.__enter__()

    def leave(self) -> None:
        """Stop listening; below another mode this one stays where it is and lets all through."""
        self.is_on = False
        current = getattr(_python_dispatch, "_get_current_dispatch_mode", lambda: self)()
        if self.is_entered and current is self:
            self.is_entered = False
            self.__exit__(None, None, None)


class EachOperator(Mode):  # type: ignore[misc]
    """Run every operator below autograd through a function of its own."""

    supports_higher_order_operators = True

    def __init__(self, run: Callable[[Any, Any, Mapping[str, Any]], Any]) -> None:
        super().__init__()
        self.run = run

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the operator."""
        return self.run(func, args, kwargs or {})


def operators_of(session: Session) -> Operators:
    """Return the session's one mode."""
    found: Operators | None = getattr(session, ATTRIBUTE, None)
    if found is None:
        found = Operators(session)
        setattr(session, ATTRIBUTE, found)
    return found


def why_not(session: Session) -> str:
    """Return why operators may not be listened to, empty when they may."""
    for root in session.roots:
        for module in root.modules():
            if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                return "the model is compiled"
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    if counters and counters["frames"].get("total"):
        return "torch.compile is at work"
    return ""


COPYING, FILLING = ("to", "cuda", "cpu"), "copy_"
"""Methods that return the tensor elsewhere, and the one that fills it from another."""
TO_DEVICE, FROM_DEVICE = "h2d", "sync"

Saw = Callable[[str, float, float, Any], None]
"""Called with `TO_DEVICE` or `FROM_DEVICE`, the moment the call began, the moment it ended, and the
tensor that was copied. It must not raise."""


class CopyTimer:
    """Wraps the methods of `torch.Tensor` that copy; torch's own class, so every tensor's.

    A copy to the device is timed on the host: a pageable one blocks until it is done, one with
    `non_blocking` from pinned memory only until it is queued. A copy to the host blocks until the
    device has caught up. `item` and its kin are left alone: wrapped, `torch.compile` could no
    longer capture them. What is compiled is not timed. Not compared on a GPU yet.
    """

    def __init__(self, saw: Saw) -> None:
        self.saw = saw
        self.calls = 0
        """Calls of the wrapped methods, copies or not: what they cost is told."""

    def install(self) -> None:
        """Time the copies of this process from now on."""
        self.is_compiling = torch.compiler.is_compiling
        for name in (*COPYING, FILLING):
            patching.wrap(torch.Tensor, name, self._copying)

    def _note(self, began: float, source: Any, target: Any) -> None:
        """Tell of a copy that left the host or came to it."""
        was_on_host = getattr(source, "is_cpu", None)  # not every source is a tensor
        if was_on_host is not None and getattr(target, "is_cpu", was_on_host) is not was_on_host:
            way = TO_DEVICE if was_on_host else FROM_DEVICE
            self.saw(way, began, time.perf_counter(), source)

    def _copying(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a method that copies a tensor."""
        is_compiling, fills = self.is_compiling, original.__name__ == FILLING

        @functools.wraps(original)
        def copied(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(tensor, *args, **kwargs)
            self.calls += 1
            began = time.perf_counter()
            result = original(tensor, *args, **kwargs)
            source = (args[0] if args else kwargs.get("other")) if fills else tensor
            self._note(began, source, result)
            return result

        return copied


class GarbageClock:
    """Adds up the collector's time in the training thread, from the first finished step on."""

    def __init__(self, session: "Session") -> None:
        self.seconds = 0.0
        self._session = session
        self._since: float | None = None

    def install(self) -> None:
        """Listen from now on; a collection costs two readings of the clock more."""
        gc.callbacks.append(self._saw)

    def _saw(self, phase: str, _: dict[str, Any]) -> None:
        session = self._session
        if phase == "start":
            is_counted = bool(session.segments) and session.is_mine()
            self._since = session.clock.now() if is_counted else None
        elif self._since is not None:
            self.seconds += session.clock.now() - self._since
            self._since = None
