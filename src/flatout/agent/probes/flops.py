"""Count the floating-point operations of the training steps, by torch's own counter.

Counted are matrix products, convolutions and attention of forward, loss and backward, two for each
multiplication with addition, by the formulas of `torch.utils.flop_counter`. What activation
checkpointing computes again in backward is left out. Everything runs under a dispatch mode that
slows it down, so this needs a pass of its own.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.utils.flop_counter as counting

from flatout.agent.measuring.operators import EachOperator
from flatout.agent.nested import leaves_of
from flatout.agent.session import Session
from flatout.agent.tf32 import allows
from flatout.records import phase_clock as phases
from flatout.records.trial_result import Segment

flop_counter: Any = counting
"""Without the types that torch does not give."""
COUNTED_PHASES = frozenset({phases.FORWARD, phases.BACKWARD, phases.OTHER})
"""Not what a data set, an optimizer or an evaluation computes."""
UNCOUNTED = ("rnn", "lstm", "gru")
"""Operations with these in their names multiply matrices, and torch has no formula for them."""


def start(session: Session, options: Mapping[str, Any]) -> "Flops":
    """Count from the first training call of a root on, until the run ends."""
    flops = Flops(session)
    session.on("forward", flops.begin)
    session.on("segment", flops.end_segment)
    session.on("stop", flops.leave)
    return flops


class Flops:
    """The operations of every segment, by the dtype they were computed in."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.segments: list[dict[str, Any]] = []
        self.by_dtype: dict[str, int] = {}
        self.uncounted: set[str] = set()
        self.counter: Any = None
        self.sieve: Any = None
        self.tf32 = {"convolution": True, "product": False}
        """Which fp32 arithmetic on CUDA runs in tf32: torch's defaults until asked."""
        self.note = session.quietly(self._note)

    def begin(self, *_: Any) -> None:
        """Enter the modes; compiled code is not used under them, so all of it is seen."""
        if self.counter is None:
            self.session.quietly(self._ask_tf32)()
            self.counter = flop_counter.FlopCounterMode(
                display=False, custom_mapping=missing_formulas()
            )
            self.counter.__enter__()
            self.sieve = EachOperator(self.run)
            self.sieve.__enter__()

    def leave(self) -> None:
        """Leave the modes: what comes now is not the training's."""
        if self.sieve is not None:
            sieve, self.sieve = self.sieve, None
            sieve.__exit__(None, None, None)
            self.counter.__exit__(None, None, None)

    def end_segment(self, segment: Segment) -> None:
        """Close a segment."""
        self.segments.append({"who": segment.who, "by_dtype": self.by_dtype})
        self.by_dtype = {}

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator above the counter, and note what that made of it."""
        before = self.counter.get_total_flops()
        out = func(*args, **kwargs)
        gained = self.counter.get_total_flops() - before
        if gained:
            self.note(func, args, gained)
        elif any(word in str(func) for word in UNCOUNTED):
            self.uncounted.add(str(func))
        return out

    def _ask_tf32(self) -> None:
        self.tf32["convolution"] = allows("cudnn", "conv")
        self.tf32["product"] = allows("cuda", "matmul")

    def _note(self, func: Any, args: Any, flops: int) -> None:
        """Add the operations of one call, if they are the training's and not done again."""
        phase = self.session.clock.stack[-1]
        if phase in COUNTED_PHASES and not (phase == phases.BACKWARD and is_recomputing()):
            name = dtype_name(func, args, self.tf32)
            self.by_dtype[name] = self.by_dtype.get(name, 0) + flops

    def result(self) -> Mapping[str, Any]:
        """Return the segments and what could not be counted."""
        return {"segments": self.segments, "uncounted": sorted(self.uncounted)}


def is_recomputing() -> bool:
    """Return whether a backward makes activations again, rather than gradients.

    Gradients are enabled then, and elsewhere in a backward only where it makes a graph of its own
    for further derivatives, as penalties and forces want it: such a graph is kept.
    """
    return torch.is_grad_enabled() and not torch._C._autograd._get_current_graph_task_keep_graph()


def dtype_name(func: Any, args: Any, tf32: Mapping[str, bool]) -> str:
    """Return the name of the arithmetic: the dtype of the first floating tensor, or `tf32`."""
    tensors = (leaf for leaf in leaves_of(args) if isinstance(leaf, torch.Tensor))
    tensor = next((each for each in tensors if each.is_floating_point()), None)
    if tensor is None:
        return "unknown"
    kind = "convolution" if "convolution" in str(func) else "product"
    if tensor.dtype == torch.float32 and tensor.is_cuda and tf32[kind]:
        return "tf32"
    return str(tensor.dtype).removeprefix("torch.")


def missing_formulas() -> dict[Any, Callable[..., int]]:
    """Return formulas for the CPU's attention and for products in groups where torch has none."""
    attention = "_scaled_dot_product_flash_attention_for_cpu"
    formulas: dict[str, Callable[..., int]] = {
        "_grouped_mm": _grouped,
        attention: _attention,
        f"{attention}_backward": _attention_backward,
    }
    found = {getattr(torch.ops.aten, name, None): formula for name, formula in formulas.items()}
    return {k: v for k, v in found.items() if k is not None and k not in flop_counter.flop_registry}


def _grouped(left: Any, right: Any, *_: Any, **__: Any) -> int:
    """Return the operations of all groups; three dimensions on both sides are plain batches."""
    batch = left[0] if len(left) == len(right) == 3 else 1
    return int(2 * batch * left[-2] * left[-1] * right[-1])


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_flop_count(query, key, value))


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(flop_counter.sdpa_backward_flop_count(grad, query, key, value))
