"""Attributes of other people's modules that are something else for a while.

Names of functions that stand where torch's own do: by them they are pickled.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def named(function: Callable[..., Any], module: str, name: str) -> Callable[..., Any]:
    """Return a function under the name of the place where it is put.

    A script may keep torch's functions in what it saves or sends to another process, and pickle
    knows a function by where it is found. Torch's own may be defined elsewhere, so a copy of their
    names is not enough: `torch.nn.functional.linear` is one of `torch._C._nn`.
    """
    function.__module__, function.__qualname__ = module, name
    return function


@contextlib.contextmanager
def swapped(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute while this runs."""
    had = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
