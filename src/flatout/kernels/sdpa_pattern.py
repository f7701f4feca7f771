"""Find attention that a module writes out by hand, in the graph of its calls.

The graph says of each call what it gave when it was traced (`sdpa_rewrite`): how many dimensions,
which number. So a product is read as one equation of named dimensions, be it `@`, `bmm` or an
einsum, and what is done to it is followed from the softmax back and on to the values.
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as changed
from typing import Any, cast

import torch
from torch import fx, nn
from torch.nn import functional

HUGE = -1e4
"""A mask value at or below this hides a position as -inf does."""
SOFTMAX = {torch.softmax, functional.softmax, "softmax"}
DROPOUT = {torch.dropout, functional.dropout}
MATMUL = {torch.matmul, torch.bmm, operator.matmul, "matmul", "bmm"}
ADDED_PRODUCT = {torch.baddbmm, "baddbmm"}
MULTIPLY = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
DIVIDE = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_"}
ADD = {operator.add, operator.iadd, torch.add, "add", "add_"}
SUBTRACT = {operator.sub, operator.isub, torch.sub, "sub", "sub_"}
WHERE = {torch.where, "where"}
FILL = {"masked_fill", "masked_fill_", torch.masked_fill}
CAST = {"to", "type", "float", "half", "bfloat16", "type_as", "contiguous"}
TRANSPOSE = {"transpose", torch.transpose, "swapaxes", torch.swapaxes}
USED_AGAIN = "its attention weights are used again, after the values or by its caller"
BROADCAST = "0123456789"
"""Names of the dimensions that an equation writes as `...`, the last one last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contraction:
    """A node that sums over one dimension of two others, as an equation of named dimensions."""

    operands: tuple[fx.Node, fx.Node]
    dims: tuple[tuple[str, ...], tuple[str, ...]]
    out: tuple[str, ...]

    def swapped(self) -> "Contraction":
        """Return it with the operands the other way round."""
        return changed(self, operands=self.operands[::-1], dims=self.dims[::-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """What is added to the scores, or hides some of them."""

    kind: str
    """`add`, `fill` where the value is true, or `keep` where it is true."""
    value: Any
    is_infinite: bool = False
    """Whether it hides by -inf: a row with nothing to see gives no number then."""
    factors: tuple[tuple[str, Any], ...] = ()
    """What an added value is multiplied with or divided by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """A node that is a product of queries and keys, whatever was done to it since."""

    product: Contraction
    factors: tuple[tuple[str, Any], ...] = ()
    """`mul` or `div`, with a number, or a tensor of one number for each matrix."""
    masks: tuple[Mask, ...] = ()

    def times(self, kind: str, factor: Any) -> "Scores":
        """Return them multiplied or divided, and what was added before with them."""
        masks = tuple(changed(m, factors=(*m.factors, (kind, factor))) for m in self.masks)
        return changed(self, factors=(*self.factors, (kind, factor)), masks=masks)

    def masked(self, mask: Mask) -> "Scores":
        """Return them with a mask on top."""
        return changed(self, masks=(*self.masks, mask))


@dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """The nodes of one attention, as found in a module's graph."""

    operands: tuple[tuple[fx.Node, tuple[str, ...], tuple[str, ...]], ...]
    """Queries, keys and values: the node, its dimensions, and in which order they are needed."""
    scores: Scores
    dropout: Any
    """A probability, or the call of a dropout module."""
    end: fx.Node
    out: tuple[tuple[str, ...], tuple[str, ...]]
    """The dimensions of the result, and in which order the script has them."""


def _target(node: Any) -> Any:
    return node.target if isinstance(node, fx.Node) and node.op != "call_module" else None


def _module_of(node: Any, root: nn.Module) -> nn.Module | None:
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    return root.get_submodule(str(node.target))


def _argument(node: fx.Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _shape(node: Any) -> tuple[int, ...]:
    return node.meta.get("shape", ()) if isinstance(node, fx.Node) else ()


def _number(value: Any) -> float | None:
    """Return the number that an argument is, or was in the real call."""
    number = value.meta.get("number") if isinstance(value, fx.Node) else value
    return number if isinstance(number, int | float) else None


def find_pattern(graph: fx.Graph, root: nn.Module) -> Pattern | None:
    """Return the first attention that a graph writes out, None where there is none left."""
    for node in graph.nodes:
        if is_softmax(node, root) and (pattern := _match(node, root)) is not None:
            return pattern
    return None


def is_softmax(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node is a softmax, as a function or a module."""
    return _target(node) in SOFTMAX or isinstance(_module_of(node, root), nn.Softmax)


def _match(softmax: fx.Node, root: nn.Module) -> Pattern | None:
    module, rank = _module_of(softmax, root), len(_shape(softmax))
    dim = module.dim if isinstance(module, nn.Softmax) else _argument(softmax, 1, "dim")
    scores = _scores(_argument(softmax, 0, "input"))
    if scores is None or dim not in (-1, rank - 1):
        return None
    *batch, row, column = scores.product.out
    product = scores.product if row in scores.product.dims[0] else scores.product.swapped()
    tail = _tail(softmax, product.out, root)
    if tail is None:
        return None
    weighted, dropout, end = tail
    values = weighted.operands[1]
    nodes = (*(_uncast(node, values) for node in product.operands), values)
    dims = (*product.dims, weighted.dims[1])
    depth, width = (_only({*one} - {*product.out}) for one in dims[1:])
    ends = ((row, depth), (column, depth), (column, width))
    known = [
        {*one} <= {*batch, *two} and {*two} <= {*one} for one, two in zip(dims, ends, strict=True)
    ]
    if not all(known) or {*weighted.out} != {*batch, row, width} or not _fit(nodes):
        return None
    return Pattern(
        operands=tuple((n, d, (*batch, *e)) for n, d, e in zip(nodes, dims, ends, strict=True)),
        scores=scores,
        dropout=dropout,
        end=end,
        out=((*batch, row, width), weighted.out),
    )


def _only(dims: set[str]) -> str:
    return dims.pop() if len(dims) == 1 else ""


def _uncast(node: fx.Node, values: fx.Node) -> fx.Node:
    """Return what a node was before the cast, where the values were not cast."""
    dtype = values.meta.get("dtype")
    while node.meta.get("dtype") != dtype and _target(node) in CAST:
        before = node.args[0]
        if not isinstance(before, fx.Node):
            break
        node = before
    return node


def _fit(nodes: Sequence[fx.Node]) -> bool:
    """Return whether one operator takes them: of one type, or autocast makes them so."""
    return len({node.meta.get("dtype") for node in nodes}) == 1 or nodes[0].meta["autocast"]


def _tail(
    softmax: fx.Node, dims: tuple[str, ...], root: nn.Module
) -> tuple[Contraction, Any, fx.Node] | None:
    """Follow the weights over dropout and casts to their product with the values."""
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
        elif (product := _product(user)) is not None:
            named = _weighted(product, node, dims)
            return (named, dropout, user) if named else None
        elif (order := _order(user)) is not None:
            dims = tuple(dims[place] for place in order)
        elif _target(user) not in CAST and not isinstance(module, nn.Identity):
            return None
        node = user
    return None


def _weighted(product: Contraction, weights: fx.Node, dims: tuple[str, ...]) -> Contraction | None:
    """Return a product of weights and values, in the names that the weights' dimensions have."""
    if product.operands[0] is not weights:
        product = product.swapped()
    names = dict(zip(product.dims[0], dims, strict=True))
    if product.operands[0] is not weights or product.operands[1] is weights:
        return None
    left, right, out = (
        tuple(names.get(dim, f"value {dim}") for dim in one) for one in (*product.dims, product.out)
    )
    return changed(product, dims=(left, right), out=out)


def _order(node: fx.Node) -> tuple[int, ...] | None:
    """Return in which order a node has the dimensions of its input, if that is all it does."""
    places, rank = list(range(len(_shape(node)))), len(_shape(node))
    target, rest = _target(node), cast("tuple[Any, ...]", node.args[1:])
    if target in TRANSPOSE and len(rest) == 2 and rank:
        one, other = (place % rank for place in rest)
        places[one], places[other] = other, one
        return tuple(places)
    if target in ("permute", torch.permute) and rest:
        given = rest[0] if isinstance(rest[0], list | tuple) else rest
        return tuple(place % rank for place in given)
    if getattr(target, "__name__", "") == "rearrange" and isinstance(rest[0], str):
        before, after = (side.split() for side in rest[0].split("->"))
        return tuple(map(before.index, after)) if sorted(before) == sorted(after) else None
    return None


def _product(node: fx.Node) -> Contraction | None:
    """Read a matrix product or an einsum of two tensors as an equation."""
    target = _target(node)
    args = node.args[1:] if target in ADDED_PRODUCT else node.args
    equation: Any = "...id,...dj->...ij"
    if getattr(target, "__name__", "") == "einsum":
        place = 0 if isinstance(args[0], str) else len(args) - 1
        equation, args = args[place], args[:place] + args[place + 1 :]
    elif target not in MATMUL | ADDED_PRODUCT:
        return None
    nodes = [arg for arg in args[:2] if isinstance(arg, fx.Node)]
    sides = equation.replace(",", "->").split("->")
    if len(nodes) != 2 or len(args) > 2 or len(sides) != 3:
        return None
    is_worded = target is not torch.einsum and target not in MATMUL | ADDED_PRODUCT
    ranks = [len(_shape(each)) for each in (*nodes, node)]
    left, right, out = (_dims(*one, is_worded=is_worded) for one in zip(sides, ranks, strict=True))
    return Contraction(operands=(nodes[0], nodes[1]), dims=(left, right), out=out) if out else None


def _dims(side: str, rank: int, *, is_worded: bool) -> tuple[str, ...]:
    """Return the names of a side of an equation, with one for each dimension of its `...`."""
    names = side.split() if is_worded else [*side.replace(" ", "").replace("...", ".")]
    for place, name in enumerate(names):
        if name.startswith("."):
            names[place : place + 1] = BROADCAST[len(BROADCAST) - rank + len(names) - 1 :]
    return tuple(names) if len({*names}) == len(names) == rank else ()


def _scores(node: Any) -> Scores | None:
    """Read a node as scores; None where it is something else, or is used for something else."""
    if not isinstance(node, fx.Node) or len(node.users) != 1:
        return None
    if (product := _product(node)) is not None:
        return _added_product(node, Scores(product=product))
    for targets, read in READERS:
        if _target(node) in targets:
            return read(node)
    return None


def _added_product(node: fx.Node, scores: Scores) -> Scores:
    if _target(node) not in ADDED_PRODUCT:
        return scores
    added, beta, alpha = node.args[0], node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1)
    scores = scores if alpha == 1 else scores.times("mul", alpha)
    if beta == 0 or _target(added) is torch.zeros:
        return scores
    return scores.masked(Mask(kind="add", value=added, factors=(("mul", beta),)))


def _cast(node: fx.Node) -> Scores | None:
    return _scores(node.args[0])


def _filled(node: fx.Node) -> Scores | None:
    condition, value = _argument(node, 1, "mask"), _argument(node, 2, "value")
    return _hidden("fill", _scores(node.args[0]), condition, _number(value))


def _chosen(node: fx.Node) -> Scores | None:
    one, condition, other = node.args[:3]
    if node.target is torch.where:
        one, condition = condition, one
    if (number := _number(other)) is not None:
        return _hidden("keep", _scores(one), condition, number)
    return _hidden("fill", _scores(other), condition, _number(one))


def _hidden(
    kind: str, scores: Scores | None, condition: Any, number: float | None
) -> Scores | None:
    if scores is None or number is None or number > HUGE:
        return None
    return scores.masked(Mask(kind=kind, value=condition, is_infinite=number == -math.inf))


def _scaled(node: fx.Node) -> Scores | None:
    kind = "mul" if _target(node) in MULTIPLY else "div"
    inner, factor = node.args[0], node.args[1]
    if not _is_factor(factor) and kind == "mul":
        inner, factor = factor, inner
    scores = _scores(inner)
    return scores.times(kind, factor) if scores is not None and _is_factor(factor) else None


def _is_factor(value: Any) -> bool:
    """Return whether a value is one number for each matrix of scores, or one for all."""
    return _number(value) is not None or (len(_shape(value)) > 1 and _shape(value)[-2:] == (1, 1))


def _summed(node: fx.Node) -> Scores | None:
    is_negative = _target(node) in SUBTRACT
    scores, mask = _scores(node.args[0]), node.args[1]
    if scores is None and not is_negative:
        scores, mask = _scores(mask), node.args[0]
    if scores is None or not isinstance(mask, fx.Node) or "alpha" in node.kwargs:
        return None
    factors = (("mul", -1.0),) if is_negative else ()
    return scores.masked(Mask(kind="add", value=mask, factors=factors))


READERS: tuple[tuple[set[Any], Callable[[fx.Node], Scores | None]], ...] = (
    (CAST, _cast),
    (FILL, _filled),
    (WHERE, _chosen),
    (MULTIPLY | DIVIDE, _scaled),
    (ADD | SUBTRACT, _summed),
)
"""What may be done to scores before the softmax, and what reads it."""


def is_constant(node: Any, root: nn.Module) -> bool:
    """Return whether a node depends on the module's buffers and on sizes alone."""
    parts: Sequence[Any] = ()
    if isinstance(node, slice):
        parts = (node.start, node.stop, node.step)
    elif isinstance(node, list | tuple):
        parts = node
    elif isinstance(node, fx.Node) and node.op == "get_attr":
        return not isinstance(operator.attrgetter(str(node.target))(root), nn.Parameter)
    elif isinstance(node, fx.Node) and not _is_size(node):
        if node.op not in ("call_function", "call_method"):
            return False
        parts = (*node.args, *node.kwargs.values())
    return all(is_constant(part, root) for part in parts)


def _is_size(node: fx.Node) -> bool:
    """Return whether a node asks for what a tensor is like, not for what it holds."""
    asked = node.args[1] if node.target is getattr else node.target
    return asked in ("size", "dim", "shape", "ndim", "device", "dtype")


def missing(graph: fx.Graph, root: nn.Module) -> str:
    """Return why a graph has no attention to replace."""
    for weights in [node for node in graph.nodes if is_softmax(node, root)]:
        while len(weights.users) == 1 and _product(weights) is None:
            (weights,) = weights.users
        if len(weights.users) > 1 and any(_product(user) for user in weights.users):
            return USED_AGAIN
    return "no softmax(q @ k^T) @ v in its forward"
