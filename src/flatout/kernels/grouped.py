"""Products of groups of rows, each group with a weight of its own."""

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
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `linear(rows of group i, weights[i], biases[i])` for all groups in one tensor.

    Args:
        x: Rows, sorted by group.
        weights: One of each group, outputs by inputs.
        biases: The same, None for none.
        counts: Rows of each group.
        sizes: The same beside the rows; without it they travel there, and a GPU is waited for.
    """
    if x.is_cuda:
        kind = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        if has_kernel(kind, weights[0]):
            return _by_kernel(x.to(kind), [w.to(kind) for w in weights], biases, counts, sizes)
        if len(counts) * max(counts) <= MAX_PADDING * x.shape[0]:
            return _padded(x, weights, biases, counts, sizes)
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
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply by torch's grouped kernel; written for GPUs, where it has not run yet."""
    sizes = _beside(x, counts) if sizes is None else sizes
    ends = sizes.cumsum(0, dtype=torch.int32)
    found: torch.Tensor = torch._grouped_mm(
        x, torch.stack(list(weights)).transpose(-2, -1), offs=ends
    )
    return found if biases is None else found + _by_row(biases, sizes, x).to(found.dtype)


def _padded(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    counts: Sequence[int],
    sizes: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply all groups padded to the largest, in one batch of products."""
    rooms, width = max(counts), x.shape[-1]
    sizes = _beside(x, counts) if sizes is None else sizes
    starts = sizes.cumsum(0) - sizes
    shifts = torch.arange(len(counts), device=x.device) * rooms - starts
    places = torch.arange(x.shape[0], device=x.device) + _repeated(shifts, sizes, x)
    roomy = x.new_zeros(len(counts) * rooms, width).index_copy(0, places, x)
    stacked = torch.stack(list(weights)).transpose(-2, -1)
    found = torch.bmm(roomy.view(len(counts), rooms, width), stacked)
    rows = found.flatten(0, 1).index_select(0, places)
    return rows if biases is None else rows + _by_row(biases, sizes, x).to(rows.dtype)


def _beside(x: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(counts), device=x.device)


def _by_row(biases: Sequence[torch.Tensor], sizes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return _repeated(torch.stack(list(biases)), sizes, x)


def _repeated(values: torch.Tensor, sizes: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the value of each group once for each of its rows; their number is known here."""
    return values.repeat_interleave(sizes, dim=0, output_size=x.shape[0])
