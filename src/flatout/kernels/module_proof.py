"""Prove that two forwards of a module compute the same: in float64, on inputs of a real call."""

import contextlib
import functools
import inspect
import itertools
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from flatout.agent import patching
from flatout.agent.measuring.attention import unseen

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
    off = [torch.autocast(kind, enabled=False) for kind in ("cpu", "cuda")[: _kinds()]]
    order = patching.Order.TECHNIQUE
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patching.swapped(functional, "dropout", lambda x, *_, **__: x, order=order)
        )
        for context in (*off, torch.compiler.set_stance("force_eager")):
            stack.enter_context(context)
        stack.enter_context(unseen())
        stack.enter_context(
            patching.wrap(functional, "scaled_dot_product_attention", _without_dropout, order=order)
        )
        yield


def _kinds() -> int:
    return 2 if torch.cuda.is_available() else 1


def _without_dropout(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def without(*args: Any, **kwargs: Any) -> torch.Tensor:
        return attend(*args, **kwargs | {"dropout_p": 0.0})

    return without


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


PLAIN = (bool, int, float, str, type(None))
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes; among them whether it trains, which is asked for on its own."""
_GONE = object()
_NO_SETTINGS = (nn.Module, torch.Tensor, type, types.ModuleType)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """The plain values that a traced forward may have read: it is another one when they change."""

    own: Mapping[str, Any]
    """The module's attributes."""
    held: Mapping[str, Mapping[Any, Any]]
    """By attribute what the code reads of the object there, such as a model's configuration."""
    named: Mapping[str, Any]
    """The globals that the forward names."""
    space: Mapping[str, Any]
    """Where those are."""

    def hold(self, module: nn.Module) -> bool:
        """Return whether they are what they were; asked in each call."""
        attributes = vars(module)
        for name, values in self.held.items():
            if not _are_still(values, _settings_of(attributes.get(name))):
                return False
        return _are_still(self.named, self.space) and _own(module) == self.own


def plain_facts(module: nn.Module) -> ModuleFacts:
    """Return the facts of a module as they are now."""
    forward: Any = inspect.unwrap(type(module).forward)
    code, space = getattr(forward, "__code__", None), getattr(forward, "__globals__", {})
    kind: Any = type(module)
    words = _words_of(kind)
    held = {
        name: {k: v for k, v in _settings_of(value).items() if k in words and isinstance(v, PLAIN)}
        for name, value in vars(module).items()
        if name in words and not isinstance(value, PLAIN)
    }
    names = [] if code is None else [n for n in code.co_names if n in space]
    return ModuleFacts(
        own=_own(module),
        held={name: values for name, values in held.items() if values},
        named={n: space[n] for n in names if isinstance(space[n], PLAIN)},
        space=space,
    )


def _own(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, PLAIN) and name not in _OF_EVERY_MODULE
    }


def _are_still(values: Mapping[Any, Any], space: Mapping[Any, Any]) -> bool:
    # Key by key: of a whole namespace torch.compile would guard the size, which each new global
    # changes. What took a value's place may be a tensor, which cannot be compared.
    for name, value in values.items():
        now = space.get(name, _GONE)
        if now is not value and (type(now) is not type(value) or now != value):
            return False
    return True


@functools.cache
def _words_of(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names and texts in the code of a class and of the functions that it names.

    What it does not name, such as a count of steps in a configuration, it does not read.
    """
    kinds = itertools.takewhile(lambda each: each is not nn.Module, kind.__mro__)
    waiting = [value for each in kinds for value in vars(each).values()]
    seen: set[Any] = set()
    words: set[str] = set()
    while waiting:
        value = waiting.pop()
        function = inspect.unwrap(getattr(value, "__func__", value))
        code = getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen.add(code)
        found = _words_in(code)
        words |= found
        space = function.__globals__
        waiting += [space[n] for n in found if isinstance(space.get(n), types.FunctionType)]
    return frozenset(words)


def _words_in(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    texts = {each for each in code.co_consts if isinstance(each, str)}
    return texts.union(code.co_names, *map(_words_in, inner))


def _settings_of(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    held: Mapping[Any, Any] = getattr(value, "__dict__", {})
    return {} if isinstance(value, _NO_SETTINGS) else held


@contextlib.contextmanager
def streams_kept() -> Iterator[list[str]]:
    """Put the random streams back afterwards; the list then names those that were drawn from."""
    drawn: list[str] = []
    streams = _streams()
    before = {name: read() for name, (read, _) in streams.items()}
    try:
        yield drawn
    finally:
        for name, (read, put) in streams.items():
            if _listed(read()) != _listed(before[name]):
                drawn.append(name)
                put(before[name])


def _streams() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Return how to read and how to set the streams of this process, by name."""
    found: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
        "random": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }
    if "numpy.random" in sys.modules:
        numpy = sys.modules["numpy.random"]
        # The other form is for one kind of generator alone.
        found["numpy.random"] = functools.partial(numpy.get_state, legacy=False), numpy.set_state
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch.cuda"] = torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    return found


def _listed(state: Any) -> Any:
    """Return a stream's state as what can be compared."""
    if isinstance(state, dict):
        return _listed(list(state.values()))
    if isinstance(state, list | tuple):
        return [_listed(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state
