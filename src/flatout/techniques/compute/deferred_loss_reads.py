"""Read losses one step late, so that the host does not wait for the device in each step.

What it does: `.item()` in a running sum or a `print` copies the value to a pinned buffer and goes
on; the number arrives while the next step runs, and what is printed is printed then.
When it helps: a GPU whose kernels are short: each read lets its queue run empty.
What it costs: lines appear on the standard output a step or two later.
How it is checked: bit by bit: no number of the training is touched, and each value that is read is
the one that stood there. Lines that branch on a value, or hand it on, read at once as before.
"""

import atexit
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.core.errors import NotApplicable
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.technique import Effect, Numerics, Technique

if TYPE_CHECKING:
    from types import FrameType

    import torch

    from flatout.engine.late_reads import Late, LateReads

MIN_SHARE = 0.01
"""Share of the step that the host waits in reads from which the lever is offered."""
GAINED_SHARE = 0.5
"""Of those waits: some are waits for the step's own work, which has to be done all the same.
Assumed; the trial shows it."""
READS = ("item", "print")
"""Kinds of waits that may be reads of single values."""
MAX_WORDS = 3
"""Lines named in the report."""
_READS: "dict[str, LateReads]" = {}
"""The late reads of this process, by `now`."""
_UNDO: list[Callable[[], None]] = []
"""What puts torch's own reads back, and the output."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeferredLossReads(Technique):
    """Read values of the loop one step late."""

    family: ClassVar[str] = "compute"
    addresses: ClassVar[frozenset[str]] = frozenset({"sync_in_step"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    by_hand: ClassVar[str] = """
In the loop, keep the sum on the device and read it where it is printed:
- total += loss.item()
+ total += loss.detach()
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["DeferredLossReads"]:
        """Return the lever where the host waits for a GPU to read values."""
        del machine
        if profile.device_kind != "cuda":
            return ()
        return [cls()] if _wait_ms(profile) >= MIN_SHARE * profile.step_ms.median else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect half of the waits to be gone."""
        del machine
        wait_ms = _wait_ms(profile)
        return Effect(
            step_ms=-GAINED_SHARE * wait_ms,
            why=f"the host waits up to {wait_ms:.2f} ms of each step to read values",
        )

    def start(self) -> None:
        """Listen to reads, and let the standard output wait for what is on its way."""
        _READS["now"] = begin()

    def forward(self, call: Callable[..., Any], root: Any) -> Callable[..., Any]:
        """At each training call, take in what the step before read."""
        del root
        reads = _READS["now"]

        def stepped(*args: Any, **kwargs: Any) -> Any:
            reads.step()
            return call(*args, **kwargs)

        return stepped

    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """When an epoch ends, take in everything."""
        del loader
        reads = _READS["now"]

        def drained() -> Iterator[Any]:
            try:
                yield from batches
            finally:
                reads.drain()

        return drained()

    def end(self) -> str:
        """Put torch's own reads back; say which lines were read late, and which could not be."""
        reads = _READS.get("now")
        if reads is None:
            return ""
        reads.drain()
        _READS.clear()
        while _UNDO:
            _UNDO.pop()()
        refused = [f"{line} ({why})" for line, why in sorted(reads.at_once.items()) if why]
        named = "; ".join(refused[:MAX_WORDS])
        if not reads.late:
            raise NotApplicable(f"no value could be read late: {named or 'none is read'}")
        words = ", ".join(f"{line} {count} times" for line, count in sorted(reads.late.items()))
        return f"read late: {words}" + (f"; at once: {named}" if named else "")


def begin() -> "LateReads":
    """Let this thread's script read values late from now on; call `step` on it in each step.

    Reads in lines that only add a value up or print it give stand-ins for numbers; `drain` waits
    for all of them.
    """
    import torch

    from flatout.engine.late_output import LateOutput
    from flatout.engine.late_reads import LateReads
    from flatout.profiling.source_lines import SourceLines

    output: Any = LateOutput(sys.stdout)
    sys.stdout = output
    reads, lines, thread = LateReads(output), SourceLines(), threading.get_ident()
    tensor: Any = torch.Tensor
    item, render, is_compiling = tensor.item, tensor.__format__, torch.compiler.is_compiling

    def is_script(frame: "FrameType") -> bool:
        return threading.get_ident() == thread and lines.is_user(frame)

    def late_item(self: "torch.Tensor") -> Any:
        if is_compiling():
            return item(self)
        frame = _reader(sys._getframe(1))
        return reads.read(self, frame, lines.of(frame)) if is_script(frame) else item(self)

    def late_format(self: "torch.Tensor", spec: str) -> str:
        frame = sys._getframe(1)
        if is_compiling() or self.dim() or not is_script(frame):
            return str(render(self, spec))
        if reads.sites.of(frame).kind != "print":
            reads.at_once.setdefault(lines.of(frame), reads.sites.of(frame).why)
            return str(render(self, spec))
        value: Late | Any = reads.read(self, frame, lines.of(frame))
        if not hasattr(value, "sample"):
            return format(value, spec)
        return reads.text(value, frame, lambda number: format(number, spec))

    tensor.item, tensor.__format__ = late_item, late_format
    _UNDO.append(functools.partial(_put_back, output, late_item, (item, render)))
    atexit.register(reads.drain)
    os.register_at_fork(after_in_child=lambda: _forget(reads))
    return reads


def _put_back(output: Any, late_item: Any, own: tuple[Any, Any]) -> None:
    """Put back what nobody replaced since."""
    import torch

    tensor: Any = torch.Tensor
    stream = output.stream
    if sys.stdout is output:
        sys.stdout = stream
    if tensor.item is late_item:
        tensor.item, tensor.__format__ = own


def _reader(frame: "FrameType") -> "FrameType":
    """Return the frame that reads, past the probe that counts reads."""
    while frame.f_back is not None and frame.f_globals["__name__"].startswith("flatout.profiling."):
        frame = frame.f_back
    return frame


def _forget(reads: "LateReads") -> None:
    """Leave to the parent what a forked child inherits: it would be printed twice."""
    reads.pending.clear()
    if reads.output is not None:
        reads.output.waiting.clear()


def _wait_ms(profile: Profile) -> float:
    waits = sum(sync.ms_per_step or 0.0 for sync in profile.syncs if sync.what in READS)
    sync_share = profile.regime.shares.get("sync", 1.0) if profile.regime else 1.0
    # A wait for a busy device costs nothing: the regime knows how much of it was idle.
    return min(waits, sync_share * profile.step_ms.median)
