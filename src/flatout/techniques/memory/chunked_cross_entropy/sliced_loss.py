"""Cross-entropy of each row, its softmax made a slice at a time and never kept."""

from collections.abc import Callable
from functools import wraps
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
        normalizers = torch.empty(len(target), dtype=torch.float32, device=logits.device)
        for start in range(0, len(target), rows):
            part = logits[start : start + rows]
            normalizers[start : start + rows] = part.float().logsumexp(1)
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
        result = torch.empty_like(logits)
        for start in range(0, len(places), ctx.rows):
            rows = slice(start, start + ctx.rows)
            part = (logits[rows].float() - normalizers[rows, None]).exp_()
            part.scatter_add_(1, places[rows, None], torch.full_like(part[:, :1], -1.0))
            result[rows] = part.mul_(gradient[rows, None])
        return result, None, None, None


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
