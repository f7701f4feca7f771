"""Whether a loss is a mean over the samples of its batch or a sum of them, read off its graph.

A rank's part of a batch gives the mean of its samples, or their sum: the whole batch's is the mean
of the ranks' means, but the sum of their sums. Two batches of different sizes tell a constant
factor, as a weight, from one over the number of samples.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

SUM, MEAN, CURVED, UNKNOWN = "sum", "mean", "curved", "unknown"
"""Curved is what is made of a mean or a sum, as its root: the parts' mean is not the batch's."""
REDUCTIONS = {1: MEAN, 2: SUM}
"""As nodes of torch's own losses save them."""
PASSED = frozenset(
    {
        *("AddBackward0", "SubBackward0", "RsubBackward1", "NegBackward0", "CloneBackward0"),
        *("AliasBackward0", "ToCopyBackward0", "ViewBackward0", "SqueezeBackward0"),
        *("UnsqueezeBackward0", "StackBackward0", "CatBackward0"),
    }
)
"""Nodes whose output is a mean or a sum of samples where their inputs are."""
OF_PARAMETERS = PASSED | {
    *("MulBackward0", "PowBackward0", "AbsBackward0", "SumBackward0", "SumBackward1"),
}
"""Nodes that a penalty on parameters is made of, weight decay by hand: alike on every rank."""
FACTORS = ("MulBackward0", "DivBackward0")
"""The same where they have one such input; directly below a sum they may make a weighted mean."""
NUMBERS = ("MulBackward1", "DivBackward1")
"""The same by a number, in torch's own losses."""
CURVES = (
    *("SqrtBackward0", "PowBackward0", "LogBackward0", "ExpBackward0", "ReciprocalBackward0"),
    *FACTORS,
)
"""Nodes that make a curved term where all their inputs are means or sums of samples."""
MOST_NODES = 256
FACTOR = "flatout_factor"
"""Of a node's metadata: the factor, which is read once."""
WEIGHT = "flatout_weight"
"""The same of a cross entropy: what its targets weigh."""
Nodes = tuple[tuple[str, float | None], ...]
"""Names of nodes, with what they multiply or divide by."""


class LossForm(NamedTuple):
    """What a loss makes of its samples."""

    forms: frozenset[str]
    """Of its terms."""
    nodes: Nodes
    """That say so."""
    sums: tuple[Nodes, ...]
    """Of each term that is a sum the factors."""
    weight: torch.Tensor | None
    """What the classes of its samples weigh, those that are ignored left out: by this, and not by
    their number, the mean of a cross entropy is divided; or what the script divides its sum by, as
    the tokens of a mask. No number where terms differ in it, None of other means."""


def forms_of(loss: torch.Tensor, samples: int) -> LossForm:
    """Return what the terms of a loss of so many samples are."""
    found: set[str] = set()
    nodes: list[tuple[str, float | None]] = []
    sums: list[Nodes] = []
    weights: list[torch.Tensor | None] = []
    waiting: deque[tuple[Any, Nodes, torch.Tensor | None]] = deque([(loss.grad_fn, (), None)])
    while waiting and len(nodes) < MOST_NODES:
        node, factors, divisor = waiting.popleft()
        if node is None:  # a constant
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        # A GradScaler's scale comes last; reading it would wait for the device.
        is_scale = not nodes and node.name() == FACTORS[0] and len(children) == 1
        factor, by = _factor_of(node) if _has_factor(node) else (None, None)
        nodes.append((node.name(), factor))
        if factor is not None:
            factors = (*factors, nodes[-1])
        if by is not None:
            divisor = by if divisor is None else divisor * by
        is_passed = factor is not None or by is not None or is_scale
        form = None if is_passed else _form_of(node, children, samples, divisor)
        if form is None:
            waiting += [(child, factors, divisor) for child in children]
            continue
        found.add(form)
        if form == SUM:
            sums.append(factors)
        if form == MEAN or (form == SUM and divisor is not None):
            weights.append(_weight_of(node, divisor))
    return LossForm(frozenset(found), tuple(nodes), tuple(sums), _common(weights))


def _weight_of(node: Any, divisor: torch.Tensor | None) -> torch.Tensor | None:
    """Return what the samples of a term weigh, times what all of a loss is divided by."""
    if _is_sum(node) or REDUCTIONS.get(getattr(node, "_saved_reduction", 0)) == SUM:
        return divisor
    if not node.name().startswith("NllLoss"):
        return None
    if WEIGHT not in node.metadata:
        saved = _saved(node, "total_weight")
        node.metadata[WEIGHT] = None if saved is None else saved.reshape(()).double()
    weight: torch.Tensor | None = node.metadata[WEIGHT]
    return weight if weight is None or divisor is None else weight * divisor


def _common(weights: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """Return what all terms weigh: no number where they differ, which is not read from a device."""
    known = [one for one in weights if one is not None]
    if not known or len(known) != len(weights):
        return None
    first = next((one for one in known if not one.is_cpu), known[0])
    for one in known:
        first = torch.where(torch.isclose(first, one.to(first.device)), first, torch.nan)
    return first


def are_constant(sums: Sequence[Nodes], whole: Sequence[Nodes], own: int, samples: int) -> bool:
    """Return whether no factor of a part's sums comes from its own samples, as in a whole batch's.

    A weight may follow a schedule where another term has none: what makes a mean divides them all.
    """
    changed = [
        (name, factor, before)
        for one, other in zip(sums, whole, strict=False)
        for (name, factor), (_, before) in zip(one, other, strict=False)
        if factor != before
    ]
    is_scheduled = all(
        name == FACTORS[0] and not math.isclose((factor or 0) * own, (before or 0) * samples)
        for name, factor, before in changed
    )
    return is_scheduled and any(one == other for one, other in zip(sums, whole, strict=False))


def tables_of(loss: torch.Tensor, samples: int) -> frozenset[tuple[int, int]]:
    """Return where below a loss a table of samples by samples is made, and of how many each.

    What compares the samples of a batch, as a contrastive loss does, has such a table, and a
    smaller one at the same place for a part of the batch. A square of weights keeps its size.
    """
    found: set[tuple[int, int]] = set()
    nodes: dict[Any, None] = dict.fromkeys(filter(None, [loss.grad_fn]))
    waiting = deque(nodes)
    while waiting:
        node = waiting.popleft()
        place = len(nodes) - len(waiting)
        for made in getattr(node, "_input_metadata", ()):
            shape = () if made.is_nested_tensor else tuple(made.shape)
            if len(shape) == 2 and shape[0] == shape[1] > 1 and shape[0] % samples == 0:
                found.add((place, shape[0] // samples))
        for child, _ in node.next_functions:
            if child is not None and child not in nodes and len(nodes) < MOST_NODES:
                nodes[child] = None
                waiting.append(child)
    return frozenset(found)


def _form_of(
    node: Any, children: list[Any], samples: int, divisor: torch.Tensor | None = None
) -> str | None:
    """Return what a term is, None where that shows below its node.

    A sum divided by what its samples count is a mean of them, be they tokens that a mask weighs.
    """
    name, form = node.name(), None
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        form = REDUCTIONS.get(reduction, UNKNOWN)
    elif name.startswith("MeanBackward"):
        form = MEAN
    elif _is_sum(node):
        is_of_samples = any(size and size % samples == 0 for size in node._saved_self_sym_sizes)
        is_weighed = any(child.name() in FACTORS for child in children)
        if _is_of_parameters(node):
            form = UNKNOWN if is_of_samples else None
        elif divisor is not None and (is_weighed or not is_of_samples):
            form = MEAN
        elif is_of_samples:
            form = UNKNOWN if is_weighed else SUM
    elif name not in PASSED:
        is_curved = name in CURVES and all(_is_of_samples(child, samples) for child in children)
        form = CURVED if is_curved else UNKNOWN
    # What divides on a device is not read; a constant would be of the host.
    return MEAN if form == SUM and divisor is not None and not divisor.is_cpu else form


def _is_sum(node: Any) -> bool:
    return bool(node.name().startswith("SumBackward"))


def _is_of_samples(node: Any, samples: int) -> bool:
    """Return whether a node's output is a mean or a sum of samples, or made of one by a factor."""
    for _ in range(MOST_NODES):
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1 or node.name() not in PASSED | {*FACTORS, *NUMBERS}:
            break
        node = children[0]
    return _form_of(node, children, samples) in (MEAN, SUM)


def _is_of_parameters(node: Any) -> bool:
    """Return whether a term is made of parameters alone, by nothing that could hold samples."""
    waiting = [node]
    for _ in range(MOST_NODES):
        if not waiting:
            return True
        one = waiting.pop()
        if isinstance(getattr(one, "variable", None), nn.Parameter):
            continue
        following = [child for child, _ in one.next_functions]
        if one.name() not in OF_PARAMETERS or None in following:
            return False
        waiting += following
    return False


def _has_factor(node: Any) -> bool:
    """Return whether a node multiplies or divides its one input by what needs no gradient."""
    inputs = [child for child, _ in node.next_functions]
    if node.name() in NUMBERS:
        return True
    if node.name() not in FACTORS or sum(child is not None for child in inputs) != 1:
        return False
    return node.name() == FACTORS[0] or inputs[0] is not None


def _factor_of(node: Any) -> tuple[float | None, torch.Tensor | None]:
    """Return the number that a node multiplies or divides by, and the tensor that it divides by.

    None where it cannot be read. What a hook has packed is not: to unpack it, checkpointing would
    compute the model again.
    """
    if FACTOR not in node.metadata:
        values = [_saved(node, name) for name in ("other", "self") if node.name() in FACTORS]
        value = next((one for one in values if one is not None), None)
        if node.name() in NUMBERS:
            value = torch.tensor(node._saved_other)
        number = value.reshape(()).double() if value is not None and value.numel() == 1 else None
        node.metadata[FACTOR] = (
            float(number) if number is not None and number.is_cpu else None,
            number if node.name() in (FACTORS[1], NUMBERS[1]) else None,
        )
    found: tuple[float | None, torch.Tensor | None] = node.metadata[FACTOR]
    return found


def _saved(node: Any, name: str) -> torch.Tensor | None:
    """Return a tensor that a node saved; None where it saved none, or a hook has packed it."""
    try:
        getattr(node, f"_raw_saved_{name}").register_hooks(_as_it_is, _as_it_is)
    except RuntimeError:  # nothing was saved, or there is a hook
        return None
    saved: torch.Tensor = getattr(node, f"_saved_{name}")
    return saved


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
