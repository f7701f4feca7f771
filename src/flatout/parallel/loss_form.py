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
CURVES = ("SqrtBackward0", "PowBackward0", "LogBackward0", "ExpBackward0", *FACTORS)
"""Nodes that make a curved term where all their inputs are means or sums of samples."""
MOST_NODES = 256
FACTOR = "flatout_factor"
"""Of a node's metadata: the factor, which is read once."""
WEIGHT = "flatout_weight"
"""The same of a cross entropy: its targets, and what they weigh."""
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
    their number, the mean of a cross entropy is divided. None of other means."""


def forms_of(loss: torch.Tensor, samples: int) -> LossForm:
    """Return what the terms of a loss of so many samples are."""
    found: set[str] = set()
    nodes: list[tuple[str, float | None]] = []
    sums: list[Nodes] = []
    means: list[Any] = []
    waiting: deque[tuple[Any, Nodes]] = deque([(loss.grad_fn, ())])
    while waiting and len(nodes) < MOST_NODES:
        node, factors = waiting.popleft()
        if node is None:  # a constant
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        factor = _factor_of(node) if node.name() in FACTORS and len(children) == 1 else None
        # A GradScaler's scale comes last; reading it would wait for the device.
        is_scale = not nodes and node.name() == FACTORS[0] and len(children) == 1
        nodes.append((node.name(), factor))
        form = None if factor is not None or is_scale else _form_of(node, children, samples)
        if factor is not None:
            factors = (*factors, nodes[-1])
        if form is not None:
            found.add(form)
            sums += [factors] if form == SUM else []
            means += [node] if form == MEAN else []
        else:
            waiting += [(child, factors) for child in children]
    return LossForm(frozenset(found), tuple(nodes), tuple(sums), _weight_of(means))


def _weight_of(means: Sequence[Any]) -> torch.Tensor | None:
    """Return what the samples of cross entropies of the same targets weigh."""
    if not all(node.name().startswith("NllLoss") for node in means):
        return None
    for node in means:
        if WEIGHT not in node.metadata:
            node.metadata[WEIGHT] = _saved(node, "target"), _saved(node, "total_weight")
    found = [node.metadata[WEIGHT] for node in means]
    if not found or any(one is None for pair in found for one in pair):
        return None
    weight: torch.Tensor = found[0][1]
    return weight if len({target.data_ptr() for target, _ in found}) == 1 else None


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


def _form_of(node: Any, children: list[Any], samples: int) -> str | None:
    """Return what a term is, None where that shows below its node."""
    name, form = node.name(), None
    reduction = getattr(node, "_saved_reduction", None)
    if reduction is not None:
        form = REDUCTIONS.get(reduction, UNKNOWN)
    elif name.startswith("MeanBackward"):
        form = MEAN
    elif name.startswith("SumBackward"):
        is_of_samples = any(size and size % samples == 0 for size in node._saved_self_sym_sizes)
        is_weighed = any(child.name() in FACTORS for child in children)
        is_odd = is_weighed or _is_of_parameters(node)
        form = (UNKNOWN if is_odd else SUM) if is_of_samples else None
    elif name not in PASSED:
        is_curved = name in CURVES and all(_is_of_samples(child, samples) for child in children)
        form = CURVED if is_curved else UNKNOWN
    return form


def _is_of_samples(node: Any, samples: int) -> bool:
    """Return whether a node's output is a mean or a sum of samples, or made of one by a factor."""
    for _ in range(MOST_NODES):
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1 or node.name() not in PASSED | {*FACTORS}:
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


def _factor_of(node: Any) -> float | None:
    """Return the number that a node multiplies or divides by; None where it cannot be read.

    What a hook has packed is not: to unpack it, checkpointing would compute the model again.
    """
    if FACTOR not in node.metadata:
        values = (_saved(node, name) for name in ("other", "self"))
        value = next((one for one in values if one is not None), None)
        is_known = value is not None and value.numel() == 1 and value.is_cpu
        node.metadata[FACTOR] = float(value) if is_known else None  # type: ignore[arg-type]
    factor: float | None = node.metadata[FACTOR]
    return factor


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
