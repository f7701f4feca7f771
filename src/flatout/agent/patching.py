"""Attributes of torch and other libraries that flatout replaces: one place for all of them.

A patch point is an attribute of a module or class; a patch is one wrapper there. Several may be
at one point, in a defined order, and each may be taken away, in any order, while the others stay.
Where other code has replaced the attribute on top of ours, theirs stays: it calls ours by a
reference that cannot be reached, so our patch is marked as off and is left below it.
"""

import enum
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

Make = Callable[[Any], Any]
"""Given what is below, returns what takes its place. It is called again when that changes."""
_NOTHING: Any = object()


class Order(enum.IntEnum):
    """Where a patch is among those of its point; of two alike the later one is outside."""

    GUARD = 0
    """Innermost: it decides what the script computes, which all others see."""
    HOOK = 1
    """Hook points and what measures."""
    TECHNIQUE = 2
    """Outermost: a technique may call what is below it twice, or from other threads."""


class Patch:
    """One wrapper at a patch point, on from the beginning; as a context it ends with the block."""

    def __init__(self, owner: Any, name: str, make: Make, order: Order) -> None:
        self.owner, self.name, self.make, self.order = owner, name, make, order
        self.by = sys._getframe(2).f_globals.get("__name__", "")
        """The module that patches."""
        self.is_on = False
        self.below: Any = None
        self.put: Any = _NOTHING
        """What this patch has put in the place of `below`."""
        self.apply()

    def apply(self) -> None:
        """Put it on, again after `undo`."""
        with _lock:
            if not self.is_on:
                self.is_on = True
                _rebuild(self.owner, self.name, self)

    def undo(self) -> None:
        """Take it off; patches above it are made again on what was below."""
        with _lock:
            if self.is_on:
                self.is_on = False
                _rebuild(self.owner, self.name)

    def place_on(self, below: Any) -> Any:
        """Return what takes the place of `below`: the same object as long as that is the same."""
        if self.put is _NOTHING or self.below is not below:
            self.put, self.below = self.make(_plain(below)), below
        return self.put

    def __enter__(self) -> "Patch":
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        owner = getattr(self.owner, "__qualname__", getattr(self.owner, "__name__", self.owner))
        return f"{owner}.{self.name} by {self.by}"


class _Inherited:
    """What an attribute is that its owner does not have itself: a base or `__getattr__` has it."""

    def __init__(self, value: Any) -> None:
        self.value = value


_points: dict[tuple[int, str], list[Patch]] = {}
"""By the owner's identity (the patches keep it alive) and attribute, from the inside out."""
_lock = threading.RLock()


def _renew_lock() -> None:
    """Forget the lock in a forked child: the thread that held it does not exist there."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


def wrap(owner: Any, name: str, make: Make, *, order: Order = Order.HOOK) -> Patch:
    """Replace an attribute by what `make` returns for the one that it finds there."""
    getattr(owner, name)  # an attribute that is not there cannot be wrapped
    return Patch(owner, name, make, order)


def swapped(owner: Any, name: str, value: Any, *, order: Order = Order.HOOK) -> Patch:
    """Replace an attribute by a value that does not depend on what was there, if anything."""
    return Patch(owner, name, lambda _: value, order)


def patches() -> Iterator[Patch]:
    """Yield the patches that are on: points in the order of their first, each from the inside."""
    with _lock:
        found = [patch for point in _points.values() for patch in point if patch.is_on]
    yield from found


def named(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """Return a function under the name of the place where it is put.

    A script may keep torch's functions in what it saves or sends to another process, and pickle
    knows a function by where it is found. Torch's own may be defined elsewhere, so a copy of their
    names is not enough: `torch.nn.functional.linear` is one of `torch._C._nn`.
    """
    function.__module__, function.__qualname__ = module, name
    return function


def at_first_call(call: Callable[..., Any], first: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call, in place of whose first run `first` is called with its arguments."""
    is_waiting = True

    @functools.wraps(call)
    def called(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_waiting
        if not is_waiting:
            return call(*args, **kwargs)
        is_waiting = False
        return first(*args, **kwargs)

    return called


def _rebuild(owner: Any, name: str, new: Patch | None = None) -> None:
    """Make the chain of a point again: without the patches that are off, and with a new one.

    Only those that no one has replaced since can be reached.
    """
    point = _points.setdefault((id(owner), name), [])
    before = vars(owner).get(name, _NOTHING)
    below = _Inherited(getattr(owner, name, None)) if before is _NOTHING else before
    num_covered = len(point)
    while num_covered and point[num_covered - 1].put is below:
        num_covered -= 1
        below = point[num_covered].below
    reached = [patch for patch in point[num_covered:] if patch.is_on]
    if new is not None and new not in point:
        reached.append(new)
    reached.sort(key=lambda patch: patch.order)
    for patch in reached:
        below = patch.place_on(below)
    point[num_covered:] = reached
    if not point:
        del _points[id(owner), name]
    if not isinstance(below, _Inherited):
        setattr(owner, name, below)
    elif before is not _NOTHING:
        delattr(owner, name)


def _plain(value: Any) -> Any:
    """Return what an attribute holds as it is called."""
    if isinstance(value, _Inherited):
        return value.value
    return value.__func__ if isinstance(value, staticmethod) else value
