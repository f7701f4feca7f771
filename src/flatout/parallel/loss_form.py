"""Whether a loss is a mean over the samples of its batch or a sum of them, read off its graph.

A rank's part of a batch gives the mean of its samples, or their sum: the whole batch's is the mean
of the ranks' means, but the sum of their sums. Two batches of different sizes tell a constant
factor, as a weight, from one over the number of samples.
"""

from collections import deque
from typing import Any

import torch

SUM, MEAN, UNKNOWN = "sum", "mean", "unknown"
REDUCTIONS = {1: MEAN, 2: SUM}
"""As nodes of torch's own losses save them."""
PASSED = frozenset(
    {
        *("AddBackward0", "SubBackward0", "NegBackward0", "CloneBackward0", "AliasBackward0"),
        *("ToCopyBackward0", "ViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0"),
        *("StackBackward0", "CatBackward0"),
    }
)
"""Nodes whose output is a mean or a sum of samples where their inputs are."""
FACTORS = ("MulBackward0", "DivBackward0")
"""The same where they have one such input; directly below a sum they may make a weighted mean."""
MOST_NODES = 256
FACTOR = "flatout_factor"
"""Of a node's metadata: the factor, which is read once."""
Nodes = tuple[tuple[str, float | None], ...]
"""Names of nodes, with what they multiply or divide by."""


def forms_of(loss: torch.Tensor, samples: int) -> tuple[frozenset[str], Nodes]:
    """Return what the terms of a loss are, and the nodes that say so, with their factors.

    Args:
        loss: A number with a graph.
        samples: How many samples it was made of.
    """
    found: set[str] = set()
    nodes: list[tuple[str, float | None]] = []
    waiting = deque([loss.grad_fn])
    while waiting and len(nodes) < MOST_NODES:
        node = waiting.popleft()
        if node is None:  # a constant
            continue
        children = [child for child, _ in node.next_functions if child is not None]
        factor = _factor_of(node) if node.name() in FACTORS and len(children) == 1 else None
        # A GradScaler's scale comes last; reading it would wait for the device.
        is_scale = not nodes and node.name() == FACTORS[0] and len(children) == 1
        nodes.append((node.name(), factor))
        form = None if factor is not None or is_scale else _form_of(node, children, samples)
        if form is not None:
            found.add(form)
        else:
            waiting += children
    return frozenset(found), tuple(nodes)


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
        form = (UNKNOWN if is_weighed else SUM) if is_of_samples else None
    elif name not in PASSED:
        form = UNKNOWN
    return form


def _factor_of(node: Any) -> float | None:
    """Return the number that a node multiplies or divides by; None where it cannot be read.

    What a hook has packed is not: to unpack it, checkpointing would compute the model again.
    """
    if FACTOR not in node.metadata:
        node.metadata[FACTOR] = _read_factor(node)
    factor: float | None = node.metadata[FACTOR]
    return factor


def _read_factor(node: Any) -> float | None:
    for name in ("other", "self"):
        try:
            getattr(node, f"_raw_saved_{name}").register_hooks(_as_it_is, _as_it_is)
        except RuntimeError:  # nothing was saved, or there is a hook
            continue
        value = getattr(node, f"_saved_{name}")
        return float(value) if value.numel() == 1 and value.is_cpu else None
    return None


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
