"""Prove that two forwards of a module compute the same: in float64, on inputs of a real call."""

import contextlib
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree

from flatout.agent import patching
from flatout.agent.measuring.attention import unseen
from flatout.agent.untouched import PLAIN, state_kept

TOLERANCE = 1e-9
"""Largest relative difference in float64: the same maths in another order differs by some 1e-14."""

INPUT = "input "
"""Before the name of an argument whose gradient is compared."""
NOISE = 1e-3
"""Gradients of parameters are compared as if they were at least this share of the largest one.

That of a key's bias is zero, as no softmax depends on it: what rounding leaves of it differs."""


class NotProvenError(Exception):
    """This module keeps its forward; the text says why."""


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
    offs = [_off(*pair, 0.0) for pair in zip(one.outputs, other.outputs, strict=True)]
    known = {k: (g, other.gradients[k]) for k, g in one.gradients.items() if g is not None}
    own = [_largest(g) for k, (g, _) in known.items() if not k.startswith(INPUT)]
    least = NOISE * max(own, default=0.0)
    offs += [_off(*pair, 0.0 if k.startswith(INPUT) else least) for k, pair in known.items()]  # type: ignore[arg-type]
    return max(offs, default=float("inf"))


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def _off(one: torch.Tensor, other: torch.Tensor, least: float) -> float:
    """Return how far two tensors are off; no number in the same places of both is no difference."""
    if not torch.equal(one.isfinite(), other.isfinite()):
        return float("inf")
    # The least number of a type, times what is hidden, leaves a mask without a gradient.
    return _largest(one - other) / max(_largest(one), least, 1e-30)


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
    named = {**{INPUT + k: v for k, v in inputs.items()}, **state}
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
    kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
    off = [torch.autocast(kind, enabled=False) for kind in kinds]
    order = patching.Order.TECHNIQUE
    with contextlib.ExitStack() as stack:
        stack.enter_context(
            patching.swapped(functional, "dropout", lambda x, *_, **__: x, order=order)
        )
        for context in (*off, torch.compiler.set_stance("force_eager"), _InDouble()):
            stack.enter_context(context)
        stack.enter_context(unseen())
        stack.enter_context(
            patching.wrap(functional, "scaled_dot_product_attention", _without_dropout, order=order)
        )
        yield


class _InDouble(TorchFunctionMode):
    """Makes float64 of smaller types that a forward names, as for the softmax of bf16 scores."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in CASTS:
            return args[0].double()
        args, kwargs = _pytree.tree_map_only(
            torch.dtype, lambda t: torch.float64 if t in SMALLER else t, (args, kwargs or {})
        )
        result = func(*args, **kwargs)
        is_smaller = isinstance(result, torch.Tensor) and result.dtype in SMALLER
        return result.double() if is_smaller else result


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


SMALLER = (torch.float32, torch.float16, torch.bfloat16)
CASTS = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)
NOT_CALLED = "it was not called"
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
"""Attributes; among them whether it trains, which is asked for on its own."""
_GONE = object()
_NO_SETTINGS = (nn.Module, torch.Tensor, type, types.ModuleType)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFacts:
    """The plain values that a traced forward may have read: it is another one when they change."""

    own: Mapping[str, Any]
    """The module's attributes."""
    absent: Sequence[str]
    """Names that it does not have, and that the code may ask for: `hasattr(self, "mask")`."""
    held: Mapping[str, Mapping[Any, Any]]
    """By attribute what the code reads of the object there, such as a model's configuration."""
    named: Mapping[str, Any]
    """The globals that the forward names."""
    space: Mapping[str, Any]
    """Where those are."""

    def hold(self, module: nn.Module) -> bool:
        """Return whether they are what they were; asked in each call."""
        # One by one: before torch 2.13 its compiler goes through no module's dictionary.
        for name in self.absent:
            if hasattr(module, name):
                return False
        for name, value in self.own.items():
            if not _is_still(value, getattr(module, name, _GONE)):
                return False
        for name, values in self.held.items():
            if not _are_still(values, _settings_of(getattr(module, name, None))):
                return False
        return _are_still(self.named, self.space)


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
        own={
            name: value
            for name, value in vars(module).items()
            if isinstance(value, PLAIN) and name not in _OF_EVERY_MODULE
        },
        absent=[
            text
            for text in sorted(_texts_of(kind))
            if text.isidentifier() and not hasattr(module, text)
        ],
        held={name: values for name, values in held.items() if values},
        named={n: space[n] for n in names if isinstance(space[n], PLAIN)},
        space=space,
    )


def _are_still(values: Mapping[Any, Any], space: Mapping[Any, Any]) -> bool:
    # Key by key: of a whole namespace torch.compile would guard the size, which each new global
    # changes. What took a value's place may be a tensor, which cannot be compared.
    return all(_is_still(value, space.get(name, _GONE)) for name, value in values.items())


def _is_still(value: Any, now: Any) -> bool:
    return now is value or (type(now) is type(value) and bool(now == value))


def _words_of(kind: Any) -> set[str]:
    """Return the names and texts in the code of a class and of the functions that it names.

    What it does not name, such as a count of steps in a configuration, it does not read.
    """
    return _texts_of(kind).union(*(code.co_names for code in _codes_of(kind)))


def _texts_of(kind: Any) -> set[str]:
    return {each for code in _codes_of(kind) for each in code.co_consts if isinstance(each, str)}


@functools.cache
def _codes_of(kind: type[nn.Module]) -> tuple[types.CodeType, ...]:
    """Return the code of a class and of the functions that it names, with what is inside of it."""
    kinds = itertools.takewhile(lambda each: each is not nn.Module, kind.__mro__)
    waiting = [value for each in kinds for value in vars(each).values()]
    seen: dict[types.CodeType, None] = {}
    while waiting:
        value = waiting.pop()
        function = inspect.unwrap(getattr(value, "__func__", value))
        code = value if isinstance(value, types.CodeType) else getattr(function, "__code__", None)
        if code is None or code in seen:
            continue
        seen[code] = None
        waiting += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        space = getattr(function, "__globals__", {})
        waiting += [
            space[n] for n in _names_in(code) if isinstance(space.get(n), types.FunctionType)
        ]
    return tuple(seen)


def _names_in(code: types.CodeType) -> set[str]:
    inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
    return set(code.co_names).union(*map(_names_in, inner))


def _settings_of(value: Any) -> Mapping[Any, Any]:
    if isinstance(value, dict):
        return value
    held: Mapping[Any, Any] = getattr(value, "__dict__", {})
    return {} if isinstance(value, _NO_SETTINGS) else held


Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments, and those with names."""


def replacing(
    call: Callable[..., Any],
    root: nn.Module,
    replace_in: Callable[..., dict[str, str]],
    outcome: dict[str, str],
) -> Callable[..., Any]:
    """Return a root's call, before whose first run modules of it are replaced as that is noted."""
    outcome.clear()
    model: Any = weakref.ref(root)  # the call is kept longer than the model may live

    def first(*args: Any, **kwargs: Any) -> Any:
        outcome.update(replace_in(model(), *args, **kwargs))
        return call(*args, **kwargs)

    return patching.at_first_call(call, first)


def replaced(
    model: nn.Module,
    found: Sequence[tuple[str, nn.Module]],
    replace: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any],
    call: Call,
) -> dict[str, str]:
    """Replace modules, compared on what they see in a call of their model; return why not, or "".

    What replaces one, given a call of it, raises `NotProvenError` where it does not.
    """
    args, kwargs = call
    modules = [module for _, module in found]
    with torch.compiler.set_stance("force_eager"):
        seen = capture(model, modules, lambda: model.forward(*args, **kwargs))
    return {
        name: _find_obstacle(module, replace, call if module is model else own)
        for (name, module), own in zip(found, seen, strict=True)
    }


def capture(
    root: nn.Module, modules: Sequence[nn.Module], call: Callable[[], Any]
) -> list[Call | None]:
    """Return the arguments with which each module is first called in a call that leaves no trace.

    Gradients are off, random and own states are put back, and autocast forgets its casts.
    """
    seen: dict[int, Call] = {}

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault(id(module), (args, kwargs))

    handles = [m.register_forward_pre_hook(keep, with_kwargs=True) for m in modules]
    try:
        with state_kept(root), torch.no_grad(), unseen():
            call()
    finally:
        for handle in handles:
            handle.remove()
    return [seen.get(id(module)) for module in modules]


def _find_obstacle(module: nn.Module, replace: Callable[..., Any], call: Call | None) -> str:
    """Replace a module's forward, given one call of it; return what is against it, or ""."""
    if call is None:
        return NOT_CALLED
    try:
        replace(module, *call)
    except NotProvenError as reason:
        return str(reason)
    except torch.OutOfMemoryError:
        return "there is no memory to compare it in"
    finally:
        forget_proof(module)
    return ""


def forget_proof(module: nn.Module) -> None:
    """Give back the memory of a proof: its peak in float64 is not that of the training."""
    devices = {parameter.device for parameter in module.parameters() if parameter.is_cuda}
    for device in devices:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
