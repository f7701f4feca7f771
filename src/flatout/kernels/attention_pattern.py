"""Find `softmax(q @ k^T * scale + mask) @ v` in the graph of a module's forward."""

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

HUGE = -1e4
"""A mask value at or below this hides a position as -inf does."""
SOFTMAX = {torch.softmax, functional.softmax, "softmax"}
DROPOUT = {torch.dropout, functional.dropout}
MATMUL = {torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm"}
MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
DIVIDE = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_"}
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
FILL = {"masked_fill", "masked_fill_", torch.masked_fill}
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
    """Tell whether a node is worked out from sizes alone."""
    if node.op == "call_method" and node.target == "size":
        return len(node.args) > 1
    if node.op == "call_function" and node.target is operator.getitem:
        return _is_sizes(node.args[0])
    arithmetic = {math.sqrt, operator.pow, *MULTIPLY, *DIVIDE}
    if node.op != "call_function" or node.target not in arithmetic:
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
    """Tell whether a node depends on the module's buffers and on sizes alone."""
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
