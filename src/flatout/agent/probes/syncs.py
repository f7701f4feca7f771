"""Which lines of the training loop make the host wait for the device, how often, how long.

The calls themselves are watched, so that the report can name them as the script does. On a GPU the
operators are watched too: what torch waits for on its own is found there. On the CPU there is
nothing to wait for: what is counted are the calls that would wait on a GPU, as the script or a
framework makes them; torch's own (an optimizer that reads its step) are left out, because on a GPU
they look at values that stay on the host. The tables of these calls and operators come first.
"""

import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from flatout.agent import patching
from flatout.agent.measuring.operators import operators_of, why_not
from flatout.agent.measuring.source_lines import SourceLines
from flatout.agent.session import Session
from flatout.analysis.steps import USUAL, running_anchor
from flatout.records import phase_clock as phases
from flatout.records.trial_result import Segment

FUNCTIONS: Mapping[str, str] = {
    "nonzero": "nonzero",
    "argwhere": "nonzero",
    "masked_select": "masked_select",
    "unique": "unique",
    "unique_consecutive": "unique",
    "bincount": "bincount",
    "equal": "equal",
    "allclose": "allclose",
    "is_nonzero": "bool",
}
"""Functions of `torch`, and methods of a tensor, that return what only the device knows, and what
they are called in the report."""
METHODS: Mapping[str, str] = {
    "item": "item",
    "tolist": "tolist",
    "cpu": "to cpu",
    "numpy": "numpy",
    "__array__": "numpy",
    "__bool__": "bool",
    "__float__": "float",
    "__int__": "int",
    "__index__": "int",
    "__complex__": "complex",
    "__repr__": "print",
    "__format__": "print",
    "__contains__": "in",
    **FUNCTIONS,
}
"""Methods alone, and those that are functions as well."""
DEVICE_CALLS = ("synchronize", "empty_cache")
"""Functions of `torch.cuda` that wait whatever they are given."""
OPERATORS: Mapping[str, str] = {
    "aten::_local_scalar_dense": "item",
    "aten::nonzero": "nonzero",
    "aten::masked_select": "masked_select",
    "aten::_unique2": "unique",
    "aten::unique_dim": "unique",
    "aten::unique_consecutive": "unique",
    "aten::bincount": "bincount",
    "aten::equal": "equal",
    "aten::_to_copy": "to cpu",
    "aten::copy_": "to cpu",
    "aten::index": "boolean index",
    "aten::index_put_": "boolean index",
}
"""Operators that may wait, on a device there is to wait for."""
SCALARS = ("item", "bool", "int", "float", "complex")
"""What reads one number. On the CPU that takes less than a microsecond, and watching it many times
as long: it is counted, and its time is taken for nothing."""
PRINTED = ("print",)
"""What runs dozens of small operators itself; no one looks at each of them."""


AFTER = 3
"""Steps before the first look: compiling and making state wait too, but once."""
SCALER = ("torch", "amp", "grad_scaler.py")
"""Where fp16 training asks for overflows: a wait that no script can leave out."""
ELSEWHERE = {phases.EVAL, phases.SAVE, phases.DATA_WAIT}
"""Phases whose waits are no part of the step's computation."""


def start(session: Session, options: Mapping[str, Any]) -> "SyncProbe":
    """Watch from the step after the warm-up on."""
    return SyncProbe(session, options)


class SyncProbe:
    """Count waits by line, and keep those of training steps."""

    def __init__(self, session: Session, options: Mapping[str, Any]) -> None:
        self.session = session
        self.listens: bool = options.get("listens", True)
        self.lines = SourceLines()
        self.notes: list[tuple[str, str]] = []
        self.seen = 0
        self.steps = 0
        self.on_device = False
        self.inside = 0
        """How many of the watched calls are running, one in the other."""
        self.waits: dict[tuple[str, str], list[float]] = {}
        self.of_step: list[tuple[str, str, float]] = []
        self.evals = [0]
        """Calls that trained nothing, by step; the last step is under way."""
        self.entered: tuple[str, float] | None = None
        self._undo: list[Callable[[], None]] = []
        session.on("segment", self.saw_segment)

    def saw_segment(self, segment: Segment) -> None:
        """Keep what the step waited for, unless it held an evaluation that most steps do not."""
        self.evals[-1] += segment.evals
        if segment.who != running_anchor([each.who for each in self.session.segments]):
            return
        self.seen += 1
        if self.seen == AFTER:
            self.begin()
        elif self.seen > AFTER and self.evals[-1] <= USUAL * statistics.median_low(self.evals):
            self.steps += 1
            for line, what, seconds in self.of_step:
                total = self.waits.setdefault((line, what), [0, 0.0])
                total[0] += 1
                total[1] += seconds
        self.of_step.clear()
        self.evals.append(0)

    def begin(self) -> None:
        """Put the watched calls in place."""
        devices = {p.device.type for root in self.session.roots for p in root.parameters()}
        self.on_device = bool(devices - {"cpu", "meta"})
        tensor: Any = torch.Tensor
        for name, what in METHODS.items():
            self._watch(tensor, name, what)
        reason = why_not(self.session) if self.listens else "this pass does without"
        if self.on_device:
            self._watch(tensor, "to", "to cpu")
            for name in DEVICE_CALLS:
                self._watch(torch.cuda, name, name)
        if reason:
            self.notes.append(("only_methods", reason))
            return
        for name, what in FUNCTIONS.items():
            self._watch(torch, name, what)
        for name in ("__getitem__", "__setitem__"):
            self._watch(tensor, name, "boolean index")
        if self.on_device:
            operators = operators_of(self.session)
            operators.before.append(self.session.quietly(self.before_operator))
            operators.after.append(self.session.quietly(self.after_operator))
            operators.enter()
            self._undo.append(operators.leave)

    def result(self) -> Mapping[str, Any]:
        """Return the waits by line."""
        while self._undo:
            self._undo.pop()()
        if not self.steps:
            self.notes.append(("syncs_unseen", ""))
        points = [[line, what, *total] for (line, what), total in self.waits.items()]
        return {
            "on_device": self.on_device,
            "steps": self.steps,
            "points": points,
            "notes": self.notes,
        }

    def before_operator(self, operator: Any, args: tuple[Any, ...]) -> None:
        """Note when an operator that waits begins, outside the watched calls."""
        self.entered = None
        what = OPERATORS.get(operator.name().partition(".")[0])
        if what is not None and not self.inside and self._is_training() and _waits(what, args):
            self.entered = what, time.perf_counter()

    def after_operator(self, operator: Any, result: Any) -> None:
        """Note how long it took."""
        if self.entered is None:
            return
        what, began = self.entered
        self.entered = None
        if what == "to cpu" and result.device.type != "cpu":
            return
        self.of_step.append((self.lines.here(), what, time.perf_counter() - began))

    def counts(self, what: str, args: tuple[Any, ...], caller: Any) -> bool:
        """Return whether a watched call waits, or would wait on a GPU, within a training step."""
        if self.inside or not self.session.is_mine() or not self._is_training():
            return False
        if what in DEVICE_CALLS:
            return True
        if what == "boolean index" and not _has_mask(args):
            return False
        if self.on_device:
            return any(_is_far(each) for each in args[:2])
        return not self.lines.is_torch(caller)

    def _is_training(self) -> bool:
        return not ELSEWHERE.intersection(self.session.clock.stack)

    def _watch(self, owner: Any, name: str, what: str) -> None:
        """Replace one call on its own with a look at the clock before and after."""
        if hasattr(owner, name):
            watched = functools.partial(self._watched, what)
            self._undo.append(patching.wrap(owner, name, watched).undo)

    def _watched(self, what: str, original: Any) -> Any:
        is_compiling = torch.compiler.is_compiling

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            # First, so that a compiler leaves the rest of this function alone.
            if is_compiling() or kwargs.get("non_blocking"):
                return original(*args, **kwargs)
            if not self.counts(what, args, sys._getframe(1)):
                return original(*args, **kwargs)
            line = self.lines.of(sys._getframe(1))
            operators = operators_of(self.session)
            was_on, operators.is_on = operators.is_on, operators.is_on and what not in PRINTED
            self.inside += 1
            began = time.perf_counter()
            try:
                result = original(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                seconds *= self.on_device or what not in SCALARS
                self.inside -= 1
                operators.is_on = was_on
            is_copy_away = what == "to cpu" and self.on_device and result.device.type != "cpu"
            if not is_copy_away and not _is_of_scaler(sys._getframe(1)):
                self.of_step.append((line, what, seconds))
            return result

        return watched


def _is_of_scaler(caller: FrameType) -> bool:
    """Return whether a gradient scaler made a call."""
    return Path(caller.f_code.co_filename).parts[-len(SCALER) :] == SCALER


def _is_far(value: Any) -> bool:
    """Return whether a value is a tensor on a device that the host may have to wait for."""
    return isinstance(value, torch.Tensor) and value.device.type not in ("cpu", "meta")


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Return whether an index holds a mask whose set positions the host has to know.

    A single value is put under a mask without counting the places.
    """
    keys = args[1] if isinstance(args[1], tuple) else (args[1],)
    value = args[2] if len(args) > 2 else None
    if len(args) > 2 and (not isinstance(value, torch.Tensor) or value.numel() == 1):
        return False
    return any(isinstance(key, torch.Tensor) and key.dtype in _MASKS for key in keys)


_MASKS = (torch.bool, torch.uint8)


def _waits(what: str, args: tuple[Any, ...]) -> bool:
    """Return whether an operator on these arguments makes the host wait for the device."""
    tensor = args[1] if what == "to cpu" and len(args) > 1 else args[0]
    if not _is_far(tensor) or (what == "to cpu" and True in args[2:3]):
        return False  # the third argument of a copy says that it shall not wait
    if what != "boolean index":
        return True
    return any(isinstance(key, torch.Tensor) and key.dtype in _MASKS for key in args[1] or ())
