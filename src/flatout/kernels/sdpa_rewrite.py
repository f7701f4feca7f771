"""Let torch's own operator compute attention that a module writes out by hand.

A module's `forward` is traced into a graph of its calls, each with what it gives in a real call.
Where the graph holds `softmax(q @ k^T * scale + mask) @ v` (`sdpa_pattern`), those calls become one
(`attend`). `replace` gives the module the new forward only after both were run on the inputs of
that call, in float64, and gave equal outputs and gradients.
"""

import contextlib
import functools
import inspect
import math
import operator
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional
from torch.utils import _pytree

from flatout.agent import patching
from flatout.agent.measuring.attention import unseen
from flatout.agent.untouched import buffers_kept, stream_states, streams_kept
from flatout.kernels.computed_trace import ComputedTrace
from flatout.kernels.module_proof import (
    NOT_CALLED,
    TOLERANCE,
    Call,
    ModuleFacts,
    NotProvenError,
    difference,
    plain_facts,
    replaced,
    result_of,
)
from flatout.kernels.sdpa_pattern import (
    HUGE,
    USED_AGAIN,
    Pattern,
    find_pattern,
    is_constant,
    missing,
)

IN_PLACE = {"masked_fill_", "mul_", "div_", "add_", "sub_"}
MAKERS = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")
"""Functions of torch that make tensors of sizes, which a trace would keep as they are."""
OTHERS = (("torch", "finfo"), ("numpy", "sqrt"), ("numpy", "power"))
"""Functions, by module, that a trace cannot enter."""
NESTED = "its forward takes tensors or modules inside of other arguments"
CALLERS = 4
"""How many modules further out one is looked for that drops the weights: from the product to the
whole encoder; all of that is compared in float64."""


def attend(  # noqa: PLR0913  one for each part of the formula
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    masks: Sequence[tuple[str, Any, bool]],
    dropout_p: float,
    *,
    causal: dict[tuple[int, ...], bool] | None = None,
    number: int = 0,
) -> torch.Tensor:
    """Return `softmax(q @ k^T * scale + masks) @ v` by torch's fused operator.

    `causal`: for which shapes masks that depend on no input are the causal one, as far as known,
    each with the number of the attention in its module.
    """
    mask = None
    for each in masks:
        one = _as_mask(q, *each)
        mask = one if mask is None else _both(mask, one, q)
    is_causal = False
    if mask is not None and causal is not None:
        shape = (number, *mask.shape, q.shape[-2], k.shape[-2])
        if shape not in causal:
            causal[shape] = is_causal_mask(mask, q.shape[-2], k.shape[-2])
        is_causal = causal[shape]
    leading = v.shape[:-2]
    if q.shape[:-2] != leading or k.shape[:-2] != leading:
        leading = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            q.shape[:-2], k.shape[:-2], leading
        )
        q, k, v = (x.expand(*leading, *x.shape[-2:]) for x in (q, k, v))
    if mask is not None and mask.dim() > 3 and len(leading) > 2:
        mask = _with_heads(mask.expand(*leading, *mask.shape[-2:]))
    mask = None if is_causal else mask
    attended = functional.scaled_dot_product_attention(
        _with_heads(q),
        _with_heads(k),
        _with_heads(v),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )
    return attended if len(leading) == 2 else attended.view(*leading, *attended.shape[-2:])


def _with_heads(x: torch.Tensor) -> torch.Tensor:
    """Return four dimensions, the last one dense: the fused kernels take nothing else."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    *batch, heads = x.shape[:-2] if x.dim() > 2 else (1,)
    return x if len(batch) == 1 else x.reshape(math.prod(batch), heads, *x.shape[-2:])


def is_causal_mask(mask: torch.Tensor, rows: int, columns: int) -> bool:
    """Return whether a mask hides exactly what is in the future, and nothing else."""
    if rows != columns or tuple(mask.shape[-2:]) != (rows, columns):
        return False
    flat = mask.reshape(-1, rows, columns)
    seen = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((flat == seen).all())
    return bool((flat.masked_fill(~seen, 0) == 0).all() and (flat[:, ~seen] <= HUGE).all())


def _as_mask(
    q: torch.Tensor,
    kind: str,
    value: Any,
    is_infinite: bool,  # noqa: FBT001  as the graph has it
) -> torch.Tensor:
    """Return what the operator takes: True for visible positions, or numbers to add."""
    if kind == "add":
        mask: torch.Tensor = value.to(q.dtype)
        return mask
    visible: torch.Tensor = value.bool() if kind == "keep" else ~value.bool()
    return visible if is_infinite else _as_numbers(visible, torch.finfo(q.dtype).min, q)


def _as_numbers(visible: torch.Tensor, hidden: float, q: torch.Tensor) -> torch.Tensor:
    return torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~visible, hidden)


def _both(one: torch.Tensor, other: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if one.dtype == torch.bool and other.dtype == torch.bool:
        return one & other
    added = [
        _as_numbers(mask, -math.inf, q) if mask.dtype == torch.bool else mask
        for mask in (one, other)
    ]
    return added[0] + added[1]


def arranged(x: torch.Tensor, dims: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    """Return a view with the dimensions in another order, and those of size 1 that it lacks.

    >>> arranged(torch.zeros(2, 3, 5), "bid", "bhdi").shape
    torch.Size([2, 1, 5, 3])
    """
    x = x.permute([dims.index(dim) for dim in wanted if dim in dims])
    for place, dim in enumerate(wanted):
        x = x if dim in dims else x.unsqueeze(place)
    return x


def replace_all(
    model: nn.Module, found: Sequence[tuple[str, nn.Module]], call: Call
) -> dict[str, str]:
    """Replace the attentions in modules, compared on what they see in a call of their model.

    Where a module returns its weights, the module that calls it may be seen to drop them, and it
    knows the modules that it hands over: then that one is replaced, with what it calls as a part
    of its own forward.

    Returns:
        Of each module why it was left alone, empty where it was replaced.
    """
    outcome = replaced(model, found, replace, call)
    places = {name: name for name, why in outcome.items() if why in (USED_AGAIN, NESTED)}
    for _ in range(CALLERS):
        inside: dict[str, list[str]] = {}
        for name in [name for name, place in places.items() if place]:
            places[name] = places[name].rpartition(".")[0]
            inside.setdefault(places[name], []).append(name)
        if not inside:
            break
        opened = {place: _between(place, names) for place, names in inside.items()}
        callers = {model.get_submodule(place): place for place in inside}
        reasons = replaced(
            model,
            [(place, module) for module, place in callers.items()],
            lambda module, a, k: replace(module, a, k, opened=opened[callers[module]]),  # noqa: B023  called here
            call,
        )
        for place, why in reasons.items():
            outcome |= {} if why or place not in outcome else {place: ""}
            for name in inside[place] if why not in (USED_AGAIN, NESTED, NOT_CALLED) else ():
                del places[name]
                outcome[name] = why and f"{outcome[name]}; its caller: {why}"
    return outcome


def _between(place: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of modules and of those between, as the module at a place knows them."""
    found = set()
    for name in names:
        words = name[len(place) :].lstrip(".").split(".")
        found |= {".".join(words[: count + 1]) for count in range(len(words))}
    return tuple(sorted(found))


def replace(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    opened: Sequence[str] = (),
) -> int:
    """Replace the attentions in a module's forward, given a real call; return how many there were.

    The forwards of modules inside that are `opened` count as a part of this one.

    Raises:
        NotProvenError: with the reason, if none was found or proven.
    """
    if any("forward" in vars(module.get_submodule(name)) for name in ("", *opened)):
        raise NotProvenError("its forward was replaced already")
    original = module.forward
    signature = inspect.signature(original)
    bound = _bound(signature, args, kwargs)
    plain = {k: v for k, v in bound.arguments.items() if not isinstance(v, torch.Tensor)}
    if any(_holds_tensor(value) for value in plain.values()):
        raise NotProvenError(NESTED)
    graph = _trace(module, opened, plain, [*bound.arguments.values()])
    count, called = 0, _called(graph)
    with graph.inserting_before(next(iter(graph.nodes))):
        known = graph.placeholder("causal")
    while (pattern := find_pattern(graph, module)) is not None:
        _rewrite(graph, pattern, module, {"causal": known, "number": count})
        count += 1
    if not count or (opened and missing(graph, module) == USED_AGAIN):
        raise NotProvenError(missing(graph, module))
    gone = called - _called(graph)
    if any(_hooks(module.get_submodule(name)) for name in gone):
        raise NotProvenError("something listens to its softmax or its dropout")
    rewritten, causal = _compile(graph), dict[tuple[int, ...], bool]()
    facts = {name: plain_facts(module.get_submodule(name)) for name in ("", *opened)}
    _prove(module, original, functools.partial(rewritten, module, causal), bound)

    # Not `bound` itself: the forward would keep the tensors of this call for good.
    names = tuple(bound.arguments)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        same = self.training and all(_is_still(self, *fact) for fact in facts.items())
        same = same and not any(_hooks(self.get_submodule(name)) for name in gone)
        for name, value in given.arguments.items():
            if name in names:
                same = same and (
                    value == plain[name] if name in plain else isinstance(value, torch.Tensor)
                )
            else:
                same = same and not value
        if same:
            with contextlib.suppress(OtherAnswerError):
                return rewritten(self, causal, *(given.arguments[x] for x in names))
        return type(self).forward(self, *given.args, **given.kwargs)

    # A bound method: a deep copy of the module, as averages make, gets one bound to itself.
    module.forward = types.MethodType(forward, module)
    return count


def _called(graph: fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_module"}


def _bound(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> inspect.BoundArguments:
    """Return the arguments of a call by name, with defaults; none may be without one."""
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    for name, parameter in signature.parameters.items():
        is_open = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if is_open and bound.arguments.pop(name):
            raise NotProvenError("its forward is given arguments without names")
    return bound


def _is_still(module: nn.Module, name: str, facts: ModuleFacts) -> bool:
    """Return whether a module is what was traced: inside of another, its own call is left out."""
    inner = module.get_submodule(name) if name else module
    if not facts.hold(inner):
        return False
    is_plain = inner.training and "forward" not in vars(inner) and not _hooks(inner)
    return is_plain or not name


def _hooks(module: nn.Module) -> bool:
    known = (module._forward_hooks, module._forward_pre_hooks)
    return any(map(bool, (*known, module._backward_hooks, module._backward_pre_hooks)))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    known = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return not isinstance(value, known)


class _Tracer(ComputedTrace):
    """Traces one forward; what each node gives says how many dimensions and parts there are."""

    proxy_buffer_attributes = True
    """A mask kept as a buffer is sliced to the length of the input."""

    def __init__(self, inputs: Sequence[Any], opened: Sequence[str]) -> None:
        packages = [sys.modules[name] for name in ("einops",) if name in sys.modules]
        super().__init__(autowrap_modules=(math, *packages))
        leaves = _pytree.tree_leaves(inputs)
        self.inputs = iter([x.clone() if isinstance(x, torch.Tensor) else x for x in leaves])
        self.opened = opened
        self.thread = threading.get_ident()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name not in self.opened

    def given(self, node: fx.Node) -> Any:
        none: dict[int, Any] = {1: (), 2: {}}
        return none[stars] if (stars := str(node.target).count("*")) else next(self.inputs)

    def create_arg(self, a: Any) -> Any:
        """Return a part of a call; numbers of NumPy print as code that names its module."""
        is_scalar = type(a).__module__ == "numpy" and getattr(a, "shape", None) == ()
        return super().create_arg(a.item() if is_scalar else a)

    def ask(self, obj: fx.Proxy, question: Callable[[Any], Any]) -> Any:
        """Return what a number, a size or a flag is; each later call checks that it is that still.

        Of what a tensor holds no later call can be sure.
        """
        if isinstance(self.values[obj.node], torch.Tensor):
            raise fx.proxy.TraceError("a tensor is asked for a number")
        asked = self.create_proxy("call_function", question, (obj,), {})
        answer = self.values[asked.node]
        self.create_proxy("call_function", answered, (asked, answer), {})
        return answer

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Return which way a branch goes."""
        return bool(self.ask(obj, bool))

    def iter(self, obj: fx.Proxy) -> Any:
        """Yield as many parts as there are in the real call."""
        parts: Any = obj
        return iter([parts[place] for place in range(self.ask(obj, len))])

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        """See calls of functions that fx leaves out, those of this thread alone."""
        points = [*((torch, name) for name in MAKERS)]
        points += [(sys.modules[owner], name) for owner, name in OTHERS if owner in sys.modules]
        with contextlib.ExitStack() as stack:
            for owner, name in points:
                stack.enter_context(patching.wrap(owner, name, self._seen))
            for question in (len, int, float):
                asked = functools.partialmethod(_asked, question)
                name = f"__{question.__name__}__"
                stack.enter_context(patching.swapped(fx.Proxy, name, asked))
            yield

    def _seen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            is_own = threading.get_ident() == self.thread and not self.is_computing
            makes = getattr(function, "__name__", "") in MAKERS
            if is_own and (makes or isinstance(args[0], fx.Proxy)):
                return self.create_proxy("call_function", function, args, kwargs)
            return function(*args, **kwargs)

        return call


def _asked(proxy: fx.Proxy, question: Callable[[Any], Any]) -> Any:
    tracer: Any = proxy.tracer
    return tracer.ask(proxy, question)


class OtherAnswerError(Exception):
    """A size, or what depends on it, is not what it was in the call that was traced."""


def answered(now: Any, then: Any) -> None:
    """Check that the traced forward is the right one for this call."""
    if now != then:
        raise OtherAnswerError


def _trace(
    module: nn.Module, opened: Sequence[str], plain: Mapping[str, Any], inputs: Sequence[Any]
) -> fx.Graph:
    inner = [module.get_submodule(name) for name in ("", *opened)]
    before = [dict(vars(each)) for each in inner]
    if any(_hooks(each) for each in inner[1:]):
        raise NotProvenError("its caller has hooks")
    try:
        with warnings.catch_warnings(), streams_kept(), buffers_kept(module), unseen():
            warnings.simplefilter("ignore")
            tracer, streams = _Tracer(inputs, opened), stream_states()
            with tracer.seeing():
                graph = tracer.trace(module, concrete_args=dict(plain) or None)
            now = stream_states()
            drawn = [name for name in streams if _listed(now[name]) != _listed(streams[name])]
    except Exception as error:  # noqa: BLE001  whatever a script's code does to stand-ins
        raise NotProvenError(f"its forward depends on values: {error}"[:200]) from None
    finally:
        kept = set()
        for each, old in zip(inner, before, strict=True):
            kept |= {k for k, v in vars(each).items() if old.get(k, NotProvenError) is not v}
            vars(each).clear()
            vars(each).update(old)
    if any(name.startswith("_tensor_constant") for name in kept):
        raise NotProvenError("its forward makes a tensor of values, which a trace would keep")
    if kept:
        raise NotProvenError(f"its forward sets {', '.join(sorted(kept))} on the module")
    if drawn:
        # The graph holds what was drawn this once, or the branch that was taken by it.
        raise NotProvenError(f"its forward draws from {', '.join(drawn)} on its own")
    _summarize(graph, tracer.values)
    return graph


def _summarize(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> None:
    """Keep of each value in a graph what is asked for, and chain what is changed in place."""
    for node in [*graph.nodes]:
        value = values.get(node)
        if isinstance(value, torch.Tensor):
            node.meta |= {"shape": tuple(value.shape), "dtype": value.dtype, "device": value.device}
            node.meta["autocast"] = torch.is_autocast_enabled(value.device.type)
            value = value.item() if value.numel() == 1 and not value.is_complex() else None
        if isinstance(value, int | float):
            node.meta["number"] = value
        if node.target is getattr and node.args[1] in ("dtype", "device"):
            node.args = (_first_alike(node.args[0], str(node.args[1])), node.args[1])
        if node.op == "call_method" and node.target in IN_PLACE:
            later = {each for each in graph.nodes if node < each}
            node.args[0].replace_all_uses_with(node, delete_user_cb=later.__contains__)


def _first_alike(node: fx.Node, name: str) -> fx.Node:
    """Return the first tensor on the way to a node that has the same type, or device.

    Scores that are asked for theirs would be computed for that alone.
    """
    for before in node.all_input_nodes:
        if "shape" in before.meta and before.meta[name] == node.meta.get(name):
            return _first_alike(before, name)
    return node


def _listed(state: Any) -> Any:
    """Return a stream's state as what can be compared."""
    if isinstance(state, dict):
        return _listed(list(state.values()))
    if isinstance(state, list | tuple):
        return [_listed(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


def _compile(graph: fx.Graph) -> Callable[..., Any]:
    """Return the graph as a function of the module, what is known of its masks, and its arguments.

    Modules alike get one function: torch's compiler takes others for other code, and gives up
    after eight of them.
    """
    made = graph.python_code("self")
    try:
        return _function_of(made.src, tuple(made.globals.items()))
    except TypeError:  # something in it cannot be compared
        return _function_of.__wrapped__(made.src, tuple(made.globals.items()))


@functools.lru_cache(maxsize=64)
def _function_of(source: str, space: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    named = dict(space)
    exec(compile(source, "<attention>", "exec"), named)  # fx generates it  # noqa: S102  the model's own source
    forward: Callable[..., Any] = named["forward"]
    return forward


def _rewrite(graph: fx.Graph, pattern: Pattern, root: nn.Module, known: dict[str, Any]) -> None:
    end = pattern.end
    with graph.inserting_before(end):
        q, k, v = (_arranged(graph, *operand) for operand in pattern.operands)
        scale: Any = 1.0
        for kind, factor in pattern.scores.factors:
            if isinstance(factor, fx.Node) and "shape" in factor.meta:
                q = _apply(graph, kind, q, factor)
            else:
                scale = _apply(graph, kind, scale, factor)
        masks = []
        for mask in pattern.scores.masks:
            value = mask.value
            for factor in mask.factors if mask.kind == "add" else ():
                value = _apply(graph, factor[0], value, factor[1])
            masks.append((mask.kind, value, mask.is_infinite))
        is_fixed = bool(masks) and is_constant([value for _, value, _ in masks], root)
        dropout = pattern.dropout
        if isinstance(dropout, fx.Node):
            module = graph.get_attr(str(dropout.target))
            dropout = graph.call_function(active_probability, (module,))
        given = (q, k, v, scale, masks, dropout)
        made = graph.call_function(attend, given, known if is_fixed else {})
        made = _arranged(graph, made, *pattern.out)
    end.replace_all_uses_with(made)
    made.meta |= {key: end.meta[key] for key in ("shape", "dtype", "autocast")}
    _erase(graph, end)


def _apply(graph: fx.Graph, kind: str, value: Any, factor: Any) -> Any:
    """Return a value multiplied or divided, now where both are known, else by a new node."""
    operation = operator.mul if kind == "mul" else operator.truediv
    if isinstance(value, fx.Node) or isinstance(factor, fx.Node):
        return value if factor in (1, 1.0) else graph.call_function(operation, (value, factor))
    return operation(value, float(factor))


def _arranged(graph: fx.Graph, node: fx.Node, dims: Any, wanted: Any) -> fx.Node:
    return node if dims == wanted else graph.call_function(arranged, (node, dims, wanted))


def active_probability(dropout: nn.Dropout) -> float:
    """Return what a dropout module drops now."""
    return dropout.p if dropout.training else 0.0


def _erase(graph: fx.Graph, end: fx.Node) -> None:
    """Take out a node and whatever was computed for it alone."""
    behind = {end}
    for node in reversed(graph.nodes):
        if node in behind and not node.users and node.op != "placeholder":
            behind.update(node.all_input_nodes)
            graph.erase_node(node)


def _prove(
    module: nn.Module,
    original: Callable[..., Any],
    rewritten: Callable[..., Any],
    bound: inspect.BoundArguments,
) -> None:
    """Compare outputs and gradients of both forwards in float64 on the inputs of a real call."""

    def in_order(*values: Any) -> Any:
        named = dict(zip(bound.arguments, values, strict=True))
        given = inspect.BoundArguments(bound.signature, named)
        return original(*given.args, **given.kwargs)

    try:
        expected = result_of(module, in_order, bound.arguments)
        found = result_of(module, rewritten, bound.arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001  whatever a script's code does in float64
        raise NotProvenError(f"it does not run in float64: {error}"[:200]) from None
    if not expected.outputs:
        raise NotProvenError("its forward returns no tensors")
    off = difference(expected, found)
    if not off <= TOLERANCE:
        raise NotProvenError(f"outputs or gradients differ by {off:.1g} on the real inputs")
