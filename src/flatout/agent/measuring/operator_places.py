"""Which module and line of the user's each operator of one step was called for.

A profiler knows names and times, and its stacks slow a step several times. This looks at one step
under a dispatch mode: in forward the running module and line, in backward those of the forward call
that the node belongs to, by autograd's sequence numbers. Times come from elsewhere.
"""

import re
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from flatout.agent.measuring.operators import EachOperator
from flatout.agent.measuring.source_lines import SourceLines
from flatout.agent.session import Session
from flatout.records import phase_clock as phases

INNER_OF_LAST = {"mm": -2, "addmm": -2, "bmm": -2, "baddbmm": -2}
"""Products of matrices, and the dimension of the last factor that is summed over."""
MOST_FRAMES = 60
Place = tuple[str, str]
"""Names of a module and of a line; empty where there is none."""
NOWHERE: Place = ("", "")


class OperatorPlaces:
    """The work of one step by operator and place."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.lines = SourceLines()
        self.work: dict[tuple[str, Place], float] = {}
        self.by_node: dict[int, Place] = {}
        """Of nodes of the graph, by sequence number, the place of the forward call."""
        self.names: dict[int, str] = {}
        self.mode: Any = None
        self.note = session.quietly(self._note)

    def begin(self) -> None:
        """Look from now on."""
        self.names = {
            id(module): f"{_family(name)} ({type(module).__name__})".lstrip()
            for root in self.session.roots
            for name, module in root.named_modules()
        }
        self.mode = EachOperator(self._run)
        self.mode.__enter__()

    def leave(self) -> None:
        """Look no further."""
        if self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)

    def result(self) -> list[list[Any]]:
        """Return operator, module, line and work: numbers that say how to share its time out."""
        return [[name, *place, work] for (name, place), work in self.work.items()]

    def _run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        out = func(*args, **kwargs)
        self.note(operator_name(func), args, out, sys._getframe(2))
        return out

    def _note(self, name: str, args: Sequence[Any], out: Any, frame: FrameType) -> None:
        phase = self.session.clock.stack[-1]
        if phase in (phases.FORWARD, phases.OTHER):
            place = (self._module_of(frame), self.lines.of(frame))
            # The node was made before its operator runs; the next one has the next number.
            self.by_node[torch.autograd._get_sequence_nr() - 1] = place  # type: ignore[attr-defined]
        elif phase == phases.BACKWARD:
            node = torch._C._current_autograd_node()
            place = self.by_node.get(node._sequence_nr(), NOWHERE) if node else NOWHERE
        else:
            return
        key = (name, place)
        self.work[key] = self.work.get(key, 0.0) + work_of(name, args, out)

    def _module_of(self, frame: FrameType) -> str:
        """Return the innermost module of the model that is running."""
        around: FrameType | None = frame
        for _ in range(MOST_FRAMES):
            if around is None:
                break
            name = self.names.get(id(around.f_locals.get("self")))
            if name:
                return name
            around = around.f_back
        return ""


def operator_name(func: Any) -> str:
    """Return what a profiler calls an operator of a dispatch mode: without its overload."""
    return str(func.name()).partition(".")[0] if hasattr(func, "name") else str(func)


def work_of(name: str, args: Sequence[Any], out: Any) -> float:
    """Return a measure of an operator's work: multiplications of a product, else elements.

    >>> a, b = torch.zeros(2, 3), torch.zeros(3, 5)
    >>> work_of("aten::mm", (a, b), a @ b), work_of("aten::mul", (a, a), a)
    (30.0, 18.0)
    """
    made, given = (
        [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        for value in (out, args)
    )
    short = name.rpartition("::")[2]
    sizes = float(sum(tensor.numel() for tensor in made))
    if short in INNER_OF_LAST and len(given) > 1:
        return sizes * given[-1].shape[INNER_OF_LAST[short]]
    if "convolution" in short and len(given) > 1:
        return sizes * given[1][0].numel()
    return sizes + sum(tensor.numel() for tensor in given)


def _family(name: str) -> str:
    """Return a module's name with the numbers of repeated layers left open.

    >>> _family("blocks.11.attention.drop")
    'blocks.*.attention.drop'
    """
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
