"""Linear layer and cross-entropy as one function: the logits of a slice of rows at a time.

The gradients are made in forward, where the slice's logits are at hand, so that nothing is computed
twice. That is the idea of Liger's fused loss (2024); backward only scales what forward kept.

Cross-entropy of each row, its softmax made a slice at a time and never kept.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional


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


_KEEPS: Callable[[], bool] = getattr(
    torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True
)
"""Whether the backward under way may come again; a torch that cannot tell is taken for yes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Loss:
    """What is computed of the logits."""

    dtype: torch.dtype
    """Of the logits: that of the products under autocast."""
    rows: int
    """Of a slice."""
    ignore_index: int = -100
    reduction: str = "mean"

    def slices(self, count: int) -> list[slice]:
        """Return the slices of so many rows."""
        return [slice(start, start + self.rows) for start in range(0, count, self.rows)]


class _Rows:
    """Losses of a slice and their gradients, from its logits."""

    def __init__(self, loss: Loss, target: torch.Tensor) -> None:
        self.loss = loss
        self.is_ignored = target == loss.ignore_index
        self.places = target.masked_fill(self.is_ignored, 0)
        self.counts = (~self.is_ignored).float()

    def divisor(self) -> torch.Tensor:
        """Return what the sum of the losses is divided by."""
        if self.loss.reduction == "sum":
            return self.counts.new_ones(())
        return self.counts.sum()

    def losses(self, rows: slice, table: torch.Tensor) -> torch.Tensor:
        """Return the losses of a slice; its logits in fp32 become their gradient in place."""
        places = self.places[rows, None]
        normalizers = table.logsumexp(1)
        result = normalizers - table.gather(1, places)[:, 0]
        table.sub_(normalizers[:, None]).exp_()
        table.scatter_add_(1, places, -self.counts[rows, None])
        # Where an ignored row's logits are not finite, 0 times them is no 0.
        table.masked_fill_(self.is_ignored[rows, None], 0.0)
        return result.masked_fill_(self.is_ignored[rows], 0.0)


class _HeadLoss(torch.autograd.Function):
    """The reduced loss; the gradients of its sum are kept for backward."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> torch.Tensor:
        with torch.autocast(given[0].device.type, enabled=False):
            return _forward(ctx, *given)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        if ctx.made is None:
            raise RuntimeError(
                "Trying to backward through the graph a second time: specify retain_graph=True "
                "when calling backward the first time"
            )
        # Without a target the mean is not a number, and its gradients are zeros, as torch's are.
        factor = torch.where(ctx.divisor != 0, gradient.float() / ctx.divisor, 0.0)
        made, keeps = ctx.made, _KEEPS()
        if not keeps:
            ctx.made = None
        scaled = []
        for table, dtype in zip(made, ctx.dtypes, strict=True):
            if table is not None:
                table = (table.float() * factor) if keeps else _scaled(table, factor)
                table = table.to(dtype)
            scaled.append(table)
        return (*scaled, None, None)


HEAD_LOSS: Any = _HeadLoss.apply
"""Rows of hidden values, the layer's weight, its bias or None, targets, the `Loss`."""


def _scaled(table: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Scale in place: no one else has it, and a second table of a vocabulary is not small."""
    return table.mul_(factor) if table.dtype == torch.float32 else table.float() * factor


def _forward(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: Loss,
) -> torch.Tensor:
    check_targets(target, len(weight), loss.ignore_index)
    rows = _Rows(loss, target)
    x, w = hidden.to(loss.dtype), weight.to(loss.dtype)
    b = None if bias is None else bias.to(loss.dtype)
    made = _blank(ctx.needs_input_grad, hidden, weight, bias)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part in loss.slices(len(target)):
        table = functional.linear(x[part], w, b).float()
        total += rows.losses(part, table).sum()
        _gather(made, part, table, x[part], w)
    ctx.made, ctx.divisor = made, rows.divisor()
    ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
    result: torch.Tensor = total / ctx.divisor
    return result


def _blank(needed: Any, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return where gradients are gathered, in fp32: sums of many slices."""
    return [
        torch.zeros(t.shape, dtype=torch.float32, device=t.device)
        if t is not None and is_needed
        else None
        for t, is_needed in zip(tensors, needed, strict=False)
    ]


def _gather(
    made: list[torch.Tensor | None],
    part: slice,
    table: torch.Tensor,
    x: torch.Tensor,
    w: torch.Tensor,
) -> None:
    hidden, weight, bias = made
    half = table.to(w.dtype)
    if hidden is not None:
        hidden[part] = half @ w
    if weight is not None and half.dtype == torch.float32:
        weight.addmm_(half.t(), x)
    elif weight is not None:
        weight += half.t() @ x
    if bias is not None:
        bias += table.sum(0)
