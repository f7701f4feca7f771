"""Prove that two forwards of a module compute the same: in float64, on inputs of a real call."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flatout.profiling.attention import unseen

TOLERANCE = 1e-9
"""Largest relative difference in float64: the same maths in another order differs by some 1e-14."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Result:
    """What a forward gave: outputs, and gradients of a fixed combination of them."""

    outputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor | None]
    """By input and parameter; None where the outputs do not depend on it."""


def difference(one: Result, other: Result) -> float:
    """Return the largest relative difference; infinite where not even the forms agree."""
    if [t.shape for t in one.outputs] != [t.shape for t in other.outputs]:
        return float("inf")
    if {k for k, g in one.gradients.items() if g is None} != {
        k for k, g in other.gradients.items() if g is None
    }:
        return float("inf")
    pairs = [*zip(one.outputs, other.outputs, strict=True)]
    pairs += [(g, other.gradients[k]) for k, g in one.gradients.items() if g is not None]  # type: ignore[misc]
    return max(map(_off, pairs), default=float("inf"))


def _off(pair: tuple[torch.Tensor, torch.Tensor]) -> float:
    one, other = pair
    if not one.numel():
        return 0.0
    scale = max(one.abs().max().item(), 1e-30)
    off = (one - other).abs().max().item() / scale
    return off if off == off else float("inf")  # noqa: PLR0124  not a number


def result_of(
    module: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]
) -> Result:
    """Run a forward of a module in float64 without dropout, on arguments by name, and backward."""
    inputs = {
        name: doubled(value).requires_grad_(value.is_floating_point())
        if isinstance(value, torch.Tensor)
        else value
        for name, value in arguments.items()
    }
    state = {
        name: doubled(t).requires_grad_(isinstance(t, nn.Parameter) and t.is_floating_point())
        for name, t in (*module.named_parameters(), *module.named_buffers())
    }
    module.forward = forward
    try:
        with plain_computing(), torch.enable_grad():
            output = torch.func.functional_call(module, state, tuple(inputs.values()))
    finally:
        del module.forward
    outputs = [t for t in tensors_in(output) if t.is_floating_point()]
    named = {**{f"input {k}": v for k, v in inputs.items()}, **state}
    leaves = {k: t for k, t in named.items() if getattr(t, "requires_grad", False)}
    gradients: tuple[torch.Tensor | None, ...] = (None,) * len(leaves)
    if outputs and leaves:
        seeds = [torch.linspace(-1, 1, t.numel()).to(t).view(t.shape) for t in outputs]
        gradients = torch.autograd.grad(outputs, list(leaves.values()), seeds, allow_unused=True)
    return Result(
        outputs=[t.detach() for t in outputs],
        gradients=dict(zip(leaves, gradients, strict=True)),
    )


@contextlib.contextmanager
def plain_computing() -> Iterator[None]:
    """Compute without dropout, autocast and compiled code, so that two runs can be compared."""
    dropout, functional.dropout = functional.dropout, lambda x, *_, **__: x
    off = [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda")[: _kinds()]]
    try:
        with contextlib.ExitStack() as stack:
            for context in (*off, torch.compiler.set_stance("force_eager")):
                stack.enter_context(context)
            stack.enter_context(unseen())
            stack.enter_context(_no_attention_dropout())
            yield
    finally:
        functional.dropout = dropout


def _kinds() -> int:
    return 2 if torch.cuda.is_available() else 1


@contextlib.contextmanager
def _no_attention_dropout() -> Iterator[None]:
    operator_, name = functional.scaled_dot_product_attention, "scaled_dot_product_attention"

    def without(*args: Any, **kwargs: Any) -> torch.Tensor:
        return operator_(*args, **kwargs | {"dropout_p": 0.0})

    setattr(functional, name, without)
    try:
        yield
    finally:
        setattr(functional, name, operator_)


def doubled(value: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float64, cut off from its graph."""
    return value.detach().double() if value.is_floating_point() else value.detach()


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested containers."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return []
    return [tensor for item in value for tensor in tensors_in(item)]


def plain_facts(module: nn.Module) -> dict[str, Any]:
    """Return the plain attributes that the traced code may have read."""
    plain = (bool, int, float, str, type(None))
    return {
        k: v
        for k, v in vars(module).items()
        if k[0] != "_" and k != "training" and isinstance(v, plain)
    }
