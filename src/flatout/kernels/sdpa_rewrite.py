"""Find attention that a module writes out by hand, and let torch's own operator compute it.

A module's `forward` is traced into a graph of its calls. Where the graph holds
`softmax(q @ k^T * scale + mask) @ v` (`find_pattern`), those calls become one (`attend`). `replace`
gives the module the new forward only after both were run on the inputs of a real call, in float64,
and gave equal outputs and gradients.
"""

import inspect
import math
import operator
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from flatout.agent.untouched import stream_states, streams_kept
from flatout.kernels.module_proof import (
    TOLERANCE,
    NotProvenError,
    difference,
    plain_facts,
    result_of,
)

HUGE = -1e4
"""A mask value at or below this hides a position as -inf does."""
SOFTMAX = {torch.softmax, functional.softmax, "softmax"}
DROPOUT = {torch.dropout, functional.dropout}
MATMUL = {torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm"}
MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
DIVIDE = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_"}
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
FILL = {"masked_fill", "masked_fill_", torch.masked_fill}
ARITHMETIC = {"math", "_operator"}
"""Modules whose functions make numbers of numbers: `width // heads`, `math.sqrt(...)`."""
CAST = {"to", "float", "type_as", "contiguous"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The nodes of one attention, as found in a module's graph."""

    q: fx.Node
    k: fx.Node
    is_transposed: bool
    """Whether `k` is still transposed, as in `q @ k_t`."""
    v: fx.Node
    scale: tuple[tuple[str, Any], ...]
    """Factors of the scores: `mul` or `div`, with a number or a node."""
    masks: tuple[tuple[str, Any, Any], ...]
    """`fill` with condition and value, or `add` with a tensor and None."""
    dropout: Any
    """A probability, or the call of a dropout module."""
    end: fx.Node


def _target(node: Any) -> Any:
    return node.target if isinstance(node, fx.Node) and node.op != "call_module" else None


def _module_of(node: Any, root: nn.Module) -> nn.Module | None:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return root.get_submodule(str(node.target))


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def find_pattern(graph: fx.Graph, root: nn.Module) -> Pattern | None:
    """Return the first attention that a graph writes out, None where there is none left."""
    for node in graph.nodes:
        is_softmax = _target(node) in SOFTMAX or isinstance(_module_of(node, root), nn.Softmax)
        if is_softmax and (pattern := _match(node, root)) is not None:
            return pattern
    return None


def _match(softmax: fx.Node, root: nn.Module) -> Pattern | None:
    module = _module_of(softmax, root)
    dim = module.dim if isinstance(module, nn.Softmax) else _argument(softmax, 1, "dim")
    head = _head(softmax.args[0])
    tail = _tail(softmax, root)
    if dim not in (-1, 3) or head is None or tail is None:
        return None
    (q, k, is_transposed), scale, masks = head
    end, v, dropout = tail
    return Pattern(
        q=q,
        k=k,
        is_transposed=is_transposed,
        v=v,
        scale=scale,
        masks=masks,
        dropout=dropout,
        end=end,
    )


def _tail(softmax: fx.Node, root: nn.Module) -> tuple[fx.Node, fx.Node, Any] | None:
    """Follow the weights over dropout and casts to the product with the values."""
    node = softmax
    dropout: Any = 0.0
    while len(node.users) == 1:
        (user,) = node.users
        module = _module_of(user, root)
        if isinstance(module, nn.Dropout):
            dropout = user
        elif _target(user) in DROPOUT:
            is_on = _argument(user, 2, "training", default=True)
            dropout = _argument(user, 1, "p", default=0.5) if is_on is True else 0.0
        elif _target(user) in MATMUL:
            values = user.args[1]
            if user.args[0] is node and isinstance(values, fx.Node):
                return user, values, dropout
            return None
        elif _target(user) not in CAST:
            return None
        node = user
    return None


def _head(node: Any) -> Any:
    """Follow the scores back over masks, then factors, to the product of queries and keys."""
    masks: list[tuple[str, Any, Any]] = []
    scale: list[tuple[str, Any]] = []
    while isinstance(node, fx.Node) and len(node.users) == 1:
        target = _target(node)
        if target in MATMUL:
            product = _product(node)
            return (product, tuple(scale), tuple(masks)) if product else None
        step = _step_back(node, target)
        if step is None or (step[0] in ("fill", "add") and scale):
            return None  # a mask below a factor is another formula
        kind, value, filler, node = step
        if kind in ("fill", "add"):
            masks.append((kind, value, filler))
        elif kind:
            scale.append((kind, value))
    return None


def _step_back(node: fx.Node, target: Any) -> tuple[str, Any, Any, Any] | None:
    """Return what one node does to the scores, and the node before it."""
    if target in CAST:
        return "", None, None, node.args[0]
    if target in FILL:
        value = _argument(node, 2, "value")
        is_huge = isinstance(value, int | float) and value <= HUGE
        return ("fill", _argument(node, 1, "mask"), value, node.args[0]) if is_huge else None
    if target in MULTIPLY | DIVIDE:
        return _factor(node, "mul" if target in MULTIPLY else "div")
    return _addend(node) if target in ADD else None


def _factor(node: fx.Node, kind: str) -> tuple[str, Any, Any, Any] | None:
    scores, factor = node.args[0], node.args[1]
    if kind == "mul" and not isinstance(scores, fx.Node):
        scores, factor = factor, scores
    is_number = not isinstance(factor, fx.Node) or _is_number(factor)
    return (kind, factor, None, scores) if is_number else None


def _addend(node: fx.Node) -> tuple[str, Any, Any, Any] | None:
    first, second = node.args[0], node.args[1]
    if not (isinstance(first, fx.Node) and isinstance(second, fx.Node)):
        return None
    scores, mask = (first, second) if _leads_to_product(first) else (second, first)
    return "add", mask, None, scores


def _is_number(node: fx.Node) -> bool:
    """Return whether a node is worked out from sizes alone."""
    if node.op == "call_method" and node.target == "size":
        return len(node.args) > 1
    if node.op == "call_function" and node.target is operator.getitem:
        return _is_sizes(node.args[0])
    if node.op != "call_function" or getattr(node.target, "__module__", "") not in ARITHMETIC:
        return False
    return all(not isinstance(a, fx.Node) or _is_number(a) for a in node.args)


def _is_sizes(node: Any) -> bool:
    if not isinstance(node, fx.Node):
        return False
    if node.op == "call_method" and node.target == "size":
        return len(node.args) == 1
    return node.target is getattr and node.args[1] == "shape"


def _leads_to_product(node: Any) -> bool:
    while isinstance(node, fx.Node) and _target(node) not in MATMUL:
        if _target(node) not in MULTIPLY | DIVIDE | CAST | FILL:
            return False
        node = next((a for a in node.args if isinstance(a, fx.Node)), None)
    return node is not None


def _product(node: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    q, k = node.args[0], node.args[1]
    if not (isinstance(q, fx.Node) and isinstance(k, fx.Node)):
        return None
    places = tuple(k.args[1:]) or tuple(k.kwargs.values())
    last_two = ((-2, -1), (-1, -2), (2, 3), (3, 2))
    inner = k.args[0] if k.args else None
    if _target(k) in ("transpose", torch.transpose) and places in last_two:
        return (q, inner, False) if isinstance(inner, fx.Node) else None
    return q, k, True


def is_constant(node: Any) -> bool:
    """Return whether a node depends on the module's buffers and on sizes alone."""
    if isinstance(node, slice):
        return all(map(is_constant, (node.start, node.stop, node.step)))
    if isinstance(node, list | tuple):
        return all(map(is_constant, node))
    if not isinstance(node, fx.Node) or node.op == "get_attr" or _is_number(node):
        return True
    if node.target is getattr:
        return node.args[1] in ("device", "dtype")
    is_call = node.op in ("call_function", "call_method")
    return is_call and all(map(is_constant, [*node.args, *node.kwargs.values()]))


@dataclass(slots=True)
class Causal:
    """Remembers for which shapes a mask that depends on no input is the causal one."""

    known: dict[tuple[int, ...], bool] = field(default_factory=dict)


def attend(  # noqa: PLR0913  one for each part of the formula
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    masks: Sequence[tuple[str, Any, Any]],
    dropout_p: float,
    *,
    causal: Causal | None = None,
) -> torch.Tensor:
    """Return `softmax(q @ k^T * scale + masks) @ v` by torch's fused operator."""
    mask = None
    for kind, value, filler in masks:
        one = _as_mask(kind, value, filler, q)
        mask = one if mask is None else _both(mask, one, q)
    is_causal = False
    if mask is not None and causal is not None:
        shape = (*mask.shape, q.shape[-2], k.shape[-2])
        if shape not in causal.known:
            causal.known[shape] = is_causal_mask(mask, q.shape[-2], k.shape[-2])
        is_causal = causal.known[shape]
    leading = v.shape[:-2]
    if q.shape[:-2] != leading or k.shape[:-2] != leading:
        leading = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            q.shape[:-2], k.shape[:-2], leading
        )
        q, k, v = (x.expand(*leading, *x.shape[-2:]) for x in (q, k, v))
    mask = None if is_causal else mask
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )


def is_causal_mask(mask: torch.Tensor, rows: int, columns: int) -> bool:
    """Return whether a mask hides exactly what is in the future, and nothing else."""
    if rows != columns or tuple(mask.shape[-2:]) != (rows, columns):
        return False
    flat = mask.reshape(-1, rows, columns)
    seen = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((flat == seen).all())
    return bool((flat.masked_fill(~seen, 0) == 0).all() and (flat[:, ~seen] <= HUGE).all())


def _as_mask(kind: str, value: Any, filler: Any, q: torch.Tensor) -> torch.Tensor:
    """Return what the operator takes: True for visible positions, or numbers to add."""
    if kind == "add":
        mask: torch.Tensor = value.to(q.dtype)
        return mask
    if filler == -math.inf:
        visible: torch.Tensor = ~value.bool()
        return visible
    limit = max(float(filler), torch.finfo(q.dtype).min)
    return torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(value.bool(), limit)


def _both(one: torch.Tensor, other: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if one.dtype == torch.bool and other.dtype == torch.bool:
        return one & other
    added = [
        torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
        if mask.dtype == torch.bool
        else mask
        for mask in (one, other)
    ]
    return added[0] + added[1]


def replace(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Replace the attentions in a module's forward; return how many there were.

    Raises:
        NotProvenError: with the reason, if none was found or proven.
    """
    if "forward" in vars(module):
        raise NotProvenError("its forward was replaced already")
    original = module.forward
    signature = inspect.signature(original)
    if any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in signature.parameters.values()):
        raise NotProvenError("its forward takes arguments without names")
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    plain = {k: v for k, v in bound.arguments.items() if not isinstance(v, torch.Tensor)}
    if any(_holds_tensor(value) for value in plain.values()):
        raise NotProvenError("its forward takes tensors inside of other arguments")
    graph = _trace(module, plain)
    count = 0
    while (pattern := find_pattern(graph, module)) is not None:
        _rewrite(graph, pattern)
        count += 1
    if not count:
        raise NotProvenError("no softmax(q @ k^T) @ v in its forward")
    rewritten = _compile(graph)
    facts = plain_facts(module)
    _prove(module, original, types.MethodType(rewritten, module), bound)

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        same = self.training and facts.hold(self)
        for name, value in given.arguments.items():
            same = same and (
                value == plain[name] if name in plain else isinstance(value, torch.Tensor)
            )
        run = rewritten if same else type(self).forward
        return run(self, *given.args, **given.kwargs)

    # A bound method: a deep copy of the module, as averages make, gets one bound to itself.
    module.forward = types.MethodType(forward, module)
    return count


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds_tensor, value))
    known = (bool, int, float, str, type(None), torch.dtype, torch.device)
    return not isinstance(value, known)


class _Tracer(fx.Tracer):
    """Traces one forward; every module inside is a call."""

    proxy_buffer_attributes = True
    """A mask kept as a buffer is sliced to the length of the input."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del m, module_qualified_name
        return True

    def iter(self, obj: fx.Proxy) -> Any:
        """Yield the parts of `chunk`, whose number is written in the call."""
        node = obj.node
        if node.target in ("chunk", torch.chunk) and isinstance(node.args[1], int):
            parts: Any = obj
            return iter([parts[place] for place in range(node.args[1])])
        return super().iter(obj)


def _trace(module: nn.Module, plain: Mapping[str, Any]) -> fx.Graph:
    before = dict(vars(module))
    try:
        with warnings.catch_warnings(), streams_kept():
            warnings.simplefilter("ignore")
            tracer, streams = _Tracer(autowrap_modules=(math,)), stream_states()
            graph = tracer.trace(module, concrete_args=dict(plain) or None)
            now = stream_states()
            drawn = [name for name in streams if _listed(now[name]) != _listed(streams[name])]
    except Exception as error:  # noqa: BLE001  whatever a script's code does to stand-ins
        raise NotProvenError(f"its forward depends on values: {error}"[:200]) from None
    finally:
        changed = {k for k, v in vars(module).items() if before.get(k, NotProvenError) is not v}
        vars(module).clear()
        vars(module).update(before)
    if changed:
        raise NotProvenError(f"its forward sets {', '.join(sorted(changed))} on the module")
    if drawn:
        # The graph holds what was drawn this once, or the branch that was taken by it.
        raise NotProvenError(f"its forward draws from {', '.join(drawn)} by itself")
    return graph


def _listed(state: Any) -> Any:
    """Return a stream's state as what can be compared."""
    if isinstance(state, dict):
        return _listed(list(state.values()))
    if isinstance(state, list | tuple):
        return [_listed(part) for part in state]
    return state.tolist() if hasattr(state, "tolist") else state


def _compile(graph: fx.Graph) -> Callable[..., Any]:
    """Return the graph as a function of the module and the arguments of its forward."""
    code = graph.python_code("self")
    space = dict(code.globals)
    exec(compile(code.src, "<attention>", "exec"), space)  # fx generates it  # noqa: S102  the model's own source
    forward: Callable[..., Any] = space["forward"]
    return forward


def _rewrite(graph: fx.Graph, pattern: Pattern) -> None:
    end = pattern.end
    with graph.inserting_before(end):
        k: Any = pattern.k
        if pattern.is_transposed:
            k = graph.call_method("transpose", (k, -2, -1))
        scale: Any = 1.0
        for kind, factor in pattern.scale:
            operation = operator.mul if kind == "mul" else operator.truediv
            if isinstance(scale, float) and not isinstance(factor, fx.Node):
                scale = operation(scale, float(factor))
            else:
                scale = graph.call_function(operation, (scale, factor))
        nodes = [value for _, value, _ in pattern.masks]
        causal = Causal() if nodes and all(map(is_constant, nodes)) else None
        dropout = pattern.dropout
        if isinstance(dropout, fx.Node):
            module = graph.get_attr(str(dropout.target))
            dropout = graph.call_function(active_probability, (module,))
        arguments = (pattern.q, k, pattern.v, scale, list(pattern.masks), dropout)
        made = graph.call_function(_with(causal), arguments)
    end.replace_all_uses_with(made)
    _erase(graph, end)


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


def _with(causal: Causal | None) -> Callable[..., torch.Tensor]:
    """Return the attention with its memory of masks; looked up when called, for the proof."""

    def attention(*given: Any) -> torch.Tensor:
        return attend(*given, causal=causal)

    return attention


def _prove(
    module: nn.Module,
    original: Callable[..., Any],
    rewritten: Callable[..., Any],
    bound: inspect.BoundArguments,
) -> None:
    """Compare outputs and gradients of both forwards in float64 on the inputs of a real call."""
    expected = result_of(module, original, bound.arguments)
    if not expected.outputs:
        raise NotProvenError("its forward returns no tensors")
    off = difference(expected, result_of(module, rewritten, bound.arguments))
    if not off <= TOLERANCE:
        raise NotProvenError(f"outputs or gradients differ by {off:.1g} on the real inputs")
