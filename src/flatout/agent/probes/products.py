"""Every matrix product of the training steps: operator, shapes, strides, and where in the step.

Matrix products and convolutions are written down so that they can be repeated alone with operands
of the same shapes, strides and dtypes. Everything runs under a dispatch mode that slows it down, so
this needs a pass of its own. Compiled code is not used under it.
"""

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils.flop_counter

from flatout.agent.measuring.operator_places import operator_name
from flatout.agent.measuring.operators import EachOperator
from flatout.agent.probes.flops import is_recomputing, missing_formulas
from flatout.agent.session import Session
from flatout.agent.tf32 import allows
from flatout.records import phase_clock as phases
from flatout.records.trial_result import Segment

flop_counter: Any = torch.utils.flop_counter
"""Without the types that torch does not give."""
PRODUCTS = frozenset(
    {
        *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"),
        *("aten::_scaled_mm", "aten::_grouped_mm"),  # in fp8; of mixtures of experts
        *("aten::convolution", "aten::convolution_backward"),
    }
)
"""Operators that are written down one by one."""
ATTENTION = "scaled_dot_product"
"""In the name of fused attention, which is only counted."""
LISTENED = frozenset({phases.FORWARD, phases.BACKWARD, phases.OTHER})
"""Not what a data set, an optimizer or an evaluation computes."""


def start(session: Session, options: Mapping[str, Any]) -> "Products":
    """Listen from the first training call of a root on, until the run ends."""
    products = Products(session)
    session.on("forward", products.begin)
    session.on("segment", products.end_segment)
    session.on("stop", products.leave)
    return products


class Products:
    """What every segment multiplied."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.calls: dict[str, dict[str, Any]] = {}
        self.numbers: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.segments: list[dict[str, Any]] = []
        self.attention_flops = 0.0
        self.mode: Any = None
        self.counter: Any = None
        self.note = session.quietly(self._note)

    def begin(self, *_: Any) -> None:
        """Enter the modes; the counter is below, for the operations of fused attention."""
        if self.mode is None:
            self.counter = flop_counter.FlopCounterMode(
                display=False, custom_mapping=missing_formulas()
            )
            self.counter.__enter__()
            self.mode = EachOperator(self.run)
            self.mode.__enter__()

    def leave(self) -> None:
        """Leave the modes: what comes now is not the training's."""
        if self.mode is not None:
            mode, self.mode = self.mode, None
            mode.__exit__(None, None, None)
            self.counter.__exit__(None, None, None)

    def end_segment(self, segment: Segment) -> None:
        """Close a segment."""
        self.segments.append(
            {"who": segment.who, "counts": self.counts, "attention_flops": self.attention_flops}
        )
        self.counts, self.attention_flops = {}, 0.0

    def run(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Run an operator, and note it where it is a product that is a part of the step."""
        name = operator_name(func)
        before = self.counter.get_total_flops() if ATTENTION in name else 0
        out = func(*args, **kwargs)
        if self.session.clock.stack[-1] not in LISTENED:
            return out
        # Alpha and beta do not change what it takes; other factors would.
        if name in PRODUCTS and set(kwargs) <= {"alpha", "beta"}:
            self.note(name, args, out)
        elif ATTENTION in name:
            self.attention_flops += self.counter.get_total_flops() - before
        return out

    def _note(self, name: str, args: Any, out: Any) -> None:
        """Write one call down."""
        phase = self.session.clock.stack[-1]
        when = "forward"
        if phase == phases.BACKWARD:
            when = "again" if is_recomputing() else "backward"
        call = {
            "operator": name,
            "when": when,
            "arguments": [described(argument) for argument in args],
            "out": described(out),
            "tf32": _runs_in_tf32(name, args),
        }
        key = json.dumps(call, sort_keys=True)
        number = self.numbers.setdefault(key, len(self.numbers))
        self.calls[str(number)] = call
        self.counts[str(number)] = self.counts.get(str(number), 0) + 1

    def result(self) -> Mapping[str, Any]:
        """Return the distinct calls, and how often each segment made them."""
        device = next((p.device.type for root in self.session.roots for p in root.parameters()), "")
        return {
            "calls": self.calls,
            "segments": self.segments,
            "device": device,
            "threads": torch.get_num_threads(),
        }


def described(value: Any) -> Any:
    """Return a plain value that tells how to make one like it."""
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return {"shape": list(value.shape), "stride": list(value.stride()), "dtype": kind}
    if isinstance(value, list | tuple):
        return [described(item) for item in value]
    return str(value) if isinstance(value, torch.dtype) else value


def _runs_in_tf32(name: str, args: Any) -> bool:
    tensor = next(argument for argument in args if isinstance(argument, torch.Tensor))
    if tensor.dtype != torch.float32 or not tensor.is_cuda:
        return False
    return allows("cudnn", "conv") if "convolution" in name else allows("cuda", "matmul")
