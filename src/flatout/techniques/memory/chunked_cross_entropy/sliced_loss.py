"""Cross-entropy of each row, its softmax made a slice at a time and never kept."""

from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch refuse a second derivative, of a plain gradient as well.

    Torch's own decorator does for gradients that have a graph; that of a loss has none, and its
    second derivative would silently be 0.
    """
    refusing: Callable[..., Any] = once_differentiable(backward)

    @wraps(backward)
    def refused(ctx: Any, gradient: torch.Tensor) -> Any:
        # Enabled where the caller wants a graph of the backward.
        if torch.is_grad_enabled():
            gradient = gradient.detach().requires_grad_()
        return refusing(ctx, gradient)

    return refused


class _RowLoss(torch.autograd.Function):
    """Loss of every row; 0 where the target is to be ignored.

    Kept for backward are the logits, which their own maker need not keep, and one number per row.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, rows: int
    ) -> torch.Tensor:
        check_targets(target, logits.shape[1], ignore_index)
        normalizers = _normalizers(logits, rows)
        is_ignored = target == ignore_index
        places = target.masked_fill(is_ignored, 0)
        chosen = logits.gather(1, places[:, None])[:, 0].float()
        ctx.save_for_backward(logits, places, is_ignored, normalizers)
        ctx.rows = rows
        return (normalizers - chosen).masked_fill_(is_ignored, 0.0)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        logits, places, is_ignored, normalizers = ctx.saved_tensors
        gradient = gradient.float().masked_fill(is_ignored, 0.0)
        if (kernels := kernels_for(logits)) is not None:
            return kernels.make_gradient(logits, places, normalizers, gradient), None, None, None
        result = torch.empty_like(logits)
        for start in range(0, len(places), ctx.rows):
            rows = slice(start, start + ctx.rows)
            part = (logits[rows].float() - normalizers[rows, None]).exp_()
            part.scatter_add_(1, places[rows, None], torch.full_like(part[:, :1], -1.0))
            result[rows] = part.mul_(gradient[rows, None])
        return result, None, None, None


def _normalizers(logits: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the logarithm of the sum of each row's exponentials, so many rows at a time."""
    if (kernels := kernels_for(logits)) is not None:
        known: torch.Tensor = kernels.find_normalizers(logits)
        return known
    found = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for start in range(0, len(logits), rows):
        found[start : start + rows] = logits[start : start + rows].float().logsumexp(1)
    return found


def kernels_for(logits: torch.Tensor) -> Any:
    """Return kernels that do whole tables at once, None where there are none."""
    if not logits.is_cuda or not logits.numel() or find_spec("triton") is None:
        return None
    from flatout.techniques.memory.chunked_cross_entropy import row_kernels

    return row_kernels if row_kernels.can_run(logits.device) else None


def check_targets(target: torch.Tensor, classes: int, ignore_index: int) -> None:
    """Refuse a target without a class on the CPU, where torch's own function does too."""
    if target.is_cuda or not target.numel():
        return
    known = target[target != ignore_index]
    if known.numel() and (int(known.min()) < 0 or int(known.max()) >= classes):
        wrong = known[(known < 0) | (known >= classes)][0]
        raise IndexError(f"Target {int(wrong)} is out of bounds.")


ROW_LOSS: Any = _RowLoss.apply
"""Logits, targets, the target to ignore, rows of a slice."""
