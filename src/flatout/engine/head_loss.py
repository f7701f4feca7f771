"""Linear layer and cross-entropy as one function: the logits of a slice of rows at a time.

The gradients are made in forward, where the slice's logits are at hand, so that nothing is computed
twice. That is the idea of Liger's fused loss (2024); backward only scales what forward kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from flatout.engine.cross_entropy import check_targets, differentiable_once

PROOF_ROWS, PROOF_CLASSES = 256, 2048
"""That the proof looks at, so that it takes no memory worth counting."""
NOISE = 1e-5
"""Relative, of fp32 sums in another order, by which ours may be further from the truth."""
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
    label_smoothing: float = 0.0
    class_weights: torch.Tensor | None = None

    def slices(self, count: int) -> list[slice]:
        """Return the slices of so many rows."""
        return [slice(start, start + self.rows) for start in range(0, count, self.rows)]


class _Rows:
    """Losses of a slice and their gradients, from its logits."""

    def __init__(self, loss: Loss, target: torch.Tensor, classes: int) -> None:
        self.loss = loss
        self.target = target
        self.is_ignored = target == loss.ignore_index
        self.places = target.masked_fill(self.is_ignored, 0)
        self.smooth = loss.label_smoothing / classes
        weights = loss.class_weights
        own = torch.ones_like(target, dtype=torch.float32)
        if weights is not None:
            own = weights.float()[self.places]
        self.own = own.masked_fill_(self.is_ignored, 0.0)
        self.others = float(classes) if weights is None else weights.float().sum()

    def divisor(self) -> torch.Tensor:
        """Return what the sum of the losses is divided by."""
        if self.loss.reduction == "sum":
            return self.own.new_ones(())
        return self.own.sum()

    def losses(self, rows: slice, table: torch.Tensor) -> torch.Tensor:
        """Return the losses of a slice; its logits in fp32 become their gradient in place."""
        places, own = self.places[rows, None], self.own[rows]
        normalizers = table.logsumexp(1)
        hit = own * (1 - self.loss.label_smoothing)
        result = hit * (normalizers - table.gather(1, places)[:, 0])
        counts = (~self.is_ignored[rows]).float()
        if self.smooth:
            spread = normalizers * self.others - self._weighed(table)
            result += self.smooth * counts * spread
        scale = hit + self.smooth * counts * self.others
        table.sub_(normalizers[:, None]).exp_().mul_(scale[:, None])
        table.scatter_add_(1, places, -hit[:, None])
        if self.smooth:
            weights = self.loss.class_weights
            floor = self.smooth * counts[:, None]
            table.sub_(floor if weights is None else floor * weights.float())
        # Where an ignored row's logits are not finite, 0 times them is no 0.
        table.masked_fill_(self.is_ignored[rows, None], 0.0)
        return result.masked_fill_(self.is_ignored[rows], 0.0)

    def _weighed(self, table: torch.Tensor) -> torch.Tensor:
        weights = self.loss.class_weights
        return table.sum(1) if weights is None else table @ weights.float()


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
    """Scale in place: nobody else has it, and a second table of a vocabulary is not small."""
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
    rows = _Rows(loss, target, len(weight))
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


def find_difference(
    plain: Callable[..., torch.Tensor],
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    loss: Loss,
) -> str | None:
    """Return what is computed otherwise than by torch's own layer and loss, None for nothing.

    Judged by rows and classes of the real batch, a few slices of them. Both ways are measured
    against float64: ours may be no further from it than twice the plain way is.

    Args:
        plain: torch's own cross-entropy.
        hidden: rows of what the layer takes.
        weight: of the layer.
        bias: of the layer, or None.
        target: of each row.
        loss: what is computed.
    """
    leaves, labels, small = _sample([hidden, weight, bias], target, loss)
    if not bool((labels != loss.ignore_index).any()):
        return None  # nothing to compare in these rows
    ways = (small.dtype, torch.float64)
    ours = _results(lambda *at: HEAD_LOSS(*at, labels, small), leaves)
    own, truth = (_results(partial(_plainly, plain, small, labels, way), leaves) for way in ways)
    names = ("loss", "gradient of the hidden values", "gradient of the weight", "of the bias")
    for name, one, other, right in zip(names, ours, own, truth, strict=False):
        allowed = 2 * torch.dist(other.double(), right) + NOISE * right.norm()
        if not bool(torch.dist(one.double(), right) <= allowed):
            return name
    return None


def _sample(
    leaves: list[torch.Tensor | None], target: torch.Tensor, loss: Loss
) -> tuple[list[torch.Tensor | None], torch.Tensor, Loss]:
    """Return rows from all over the batch, and of the classes those they have and some others."""
    hidden, weight, bias = leaves
    assert hidden is not None
    assert weight is not None
    rows = _spread(len(target), PROOF_ROWS, target.device)
    labels = target[rows]
    is_known = labels != loss.ignore_index
    some = _spread(len(weight), PROOF_CLASSES, target.device)
    classes = torch.unique(torch.cat([some, labels[is_known]]))
    labels = torch.where(is_known, torch.searchsorted(classes, labels), loss.ignore_index)
    weights = loss.class_weights
    small = replace(
        loss,
        rows=len(rows) // 3 + 1,
        class_weights=None if weights is None else weights[classes],
    )
    picked = [hidden[rows], weight[classes], None if bias is None else bias[classes]]
    return picked, labels, small


def _spread(count: int, most: int, device: torch.device) -> torch.Tensor:
    return torch.linspace(0, count - 1, min(count, most), dtype=torch.float64, device=device).long()


def _results(
    call: Callable[..., torch.Tensor], leaves: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return the loss and the gradients of what it is made of."""
    at = [None if t is None else t.detach().clone().requires_grad_() for t in leaves]
    with torch.enable_grad():
        result = call(*at)
        gradients = torch.autograd.grad(result, [t for t in at if t is not None])
    return [result.detach(), *gradients]


def _plainly(  # noqa: PLR0913, PLR0917  those of the loss
    plain: Callable[..., torch.Tensor],
    loss: Loss,
    target: torch.Tensor,
    dtype: torch.dtype,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return the loss as torch computes it, from logits of one precision."""
    wide = torch.promote_types(dtype, torch.float32)
    weights = loss.class_weights
    with torch.autocast(hidden.device.type, enabled=False):
        b = None if bias is None else bias.to(dtype)
        return plain(
            functional.linear(hidden.to(dtype), weight.to(dtype), b).to(wide),
            target,
            None if weights is None else weights.to(wide),
            ignore_index=loss.ignore_index,
            reduction=loss.reduction,
            label_smoothing=loss.label_smoothing,
        )
