"""Products of groups of rows, each group with a weight of its own."""

import itertools
from collections.abc import Sequence

import torch
from torch.nn import functional

ALIGNED = 8
"""Elements of 16 bytes in bf16: what the grouped kernel wants of both widths."""
MAX_PADDING = 2.0
"""Rows after padding over rows before it, from which on single products are less work."""


def grouped_linear(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    counts: Sequence[int],
) -> torch.Tensor:
    """Return `linear(rows of group i, weights[i], biases[i])` for all groups in one tensor.

    Args:
        x: Rows, sorted by group.
        weights: One of each group, outputs by inputs.
        biases: The same, None for none.
        counts: Rows of each group.
    """
    if x.is_cuda:
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if has_kernel(kind, weights[0]):
            return _by_kernel(x.to(kind), [w.to(kind) for w in weights], biases, counts)
        if len(counts) * max(counts) <= MAX_PADDING * x.shape[0]:
            return _padded(x, weights, biases, counts)
    parts = torch.split(x, list(counts))
    found = [
        functional.linear(part, weight, None if biases is None else biases[i])
        for i, (part, weight) in enumerate(zip(parts, weights, strict=True))
    ]
    return torch.cat(found)


def has_kernel(kind: torch.dtype, weight: torch.Tensor) -> bool:
    """Tell whether torch multiplies groups of these in one kernel."""
    fits = kind == torch.bfloat16 and all(size % ALIGNED == 0 for size in weight.shape)
    return fits and hasattr(torch, "_grouped_mm") and torch.cuda.get_device_capability() >= (8, 0)


def _by_kernel(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    counts: Sequence[int],
) -> torch.Tensor:
    """Multiply by torch's grouped kernel; written for GPUs, where it has not run yet."""
    ends = torch.tensor(list(itertools.accumulate(counts)), dtype=torch.int32, device=x.device)
    found: torch.Tensor = torch._grouped_mm(
        x, torch.stack(list(weights)).transpose(-2, -1), offs=ends
    )
    return found if biases is None else found + _by_row(biases, counts).to(found.dtype)


def _padded(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    counts: Sequence[int],
) -> torch.Tensor:
    """Multiply all groups padded to the largest, in one batch of products."""
    rooms, width = max(counts), x.shape[-1]
    places = torch.cat([torch.arange(n, device=x.device) + i * rooms for i, n in enumerate(counts)])
    roomy = x.new_zeros(len(counts) * rooms, width).index_copy(0, places, x)
    stacked = torch.stack(list(weights)).transpose(-2, -1)
    found = torch.bmm(roomy.view(len(counts), rooms, width), stacked)
    rows = found.flatten(0, 1).index_select(0, places)
    return rows if biases is None else rows + _by_row(biases, counts).to(rows.dtype)


def _by_row(biases: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    each = torch.tensor(list(counts), device=biases[0].device)
    return torch.stack(list(biases)).repeat_interleave(each, dim=0)
