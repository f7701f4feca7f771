"""Autograd graphs that outlive their step: somebody keeps a loss and with it all of its past."""

import gc
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import FrameType
from typing import Any

import torch

from flatout.profiling.live_tensors import PLAIN
from flatout.seams.session import Session

MAX_NODES = 50_000
"""Nodes counted at the end of a step: far above, the growth is known."""
MAX_NAMES = 5
"""Variables named; the first are of the innermost function."""
SEVERAL = 2
"""Steps whose graphs a variable must hold to be named: the running step's loss holds one."""
MAX_ITEMS = 1_000
"""Items of a list that are looked through for a tensor with a graph."""


class KeptGraphs:
    """Count, at the ends of steps, the nodes that tensors still hold."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.nodes: list[int] = []

    def count(self) -> None:
        """Count the nodes now."""
        self.nodes.append(_count(tensor.grad_fn for tensor in _with_graph(gc.get_objects())))

    def names(self) -> list[str]:
        """Return the variables of the running functions that hold graphs of several steps.

        To be asked at the end only: reading a frame's variables keeps them alive.
        """
        grown = [late - early for early, late in pairwise(self.nodes)]
        if not grown or min(grown) <= 0:
            return []
        found: list[str] = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            module = str(frame.f_globals.get("__name__", ""))
            if not module.startswith(("torch.", "flatout.")):
                found += _holders(frame, SEVERAL * max(grown))
            frame = frame.f_back
        return list(dict.fromkeys(found))[:MAX_NAMES]


def _holders(frame: FrameType, many: float) -> Iterator[str]:
    for name, value in list(frame.f_locals.items()):
        tensors = list(_with_graph(_parts(value)))
        if tensors and _count(tensor.grad_fn for tensor in tensors) > many:
            yield name


def _with_graph(things: Any) -> Iterator[torch.Tensor]:
    for thing in things:
        if type(thing) in PLAIN and thing.grad_fn is not None:
            yield thing


def _parts(value: Any) -> list[Any]:
    if type(value) is dict:
        return list(value.values())[:MAX_ITEMS]
    return list(value)[:MAX_ITEMS] if type(value) in (list, tuple) else [value]


def _count(roots: Any) -> int:
    waiting = list(roots)
    seen: set[Any] = set()
    while waiting and len(seen) < MAX_NODES:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [parent for parent, _ in node.next_functions]
    return len(seen)
