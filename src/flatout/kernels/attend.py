"""Attention as a formula with masks and factors, computed by torch's fused operator."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from flatout.kernels.attention_pattern import HUGE
from flatout.profiling.attention import backend_of, may_look


@dataclass(slots=True)
class Causal:
    """Remembers for which shapes a mask that depends on no input is the causal one."""

    known: dict[tuple[int, ...], bool] = field(default_factory=dict)


def attend(  # noqa: PLR0913  one for each part of the formula
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float,
    masks: Sequence[tuple[str, Any, Any]],
    dropout_p: float,
    *,
    causal: Causal | None = None,
) -> torch.Tensor:
    """Return `softmax(q @ k^T * scale + masks) @ v` by torch's fused operator."""
    mask = None
    for kind, value, filler in masks:
        one = _as_mask(kind, value, filler, q)
        mask = one if mask is None else _both(mask, one, q)
    is_causal = False
    if mask is not None and causal is not None:
        shape = (*mask.shape, q.shape[-2], k.shape[-2])
        if shape not in causal.known:
            causal.known[shape] = is_causal_mask(mask, q.shape[-2], k.shape[-2])
        is_causal = causal.known[shape]
    leading = v.shape[:-2]
    if q.shape[:-2] != leading or k.shape[:-2] != leading:
        leading = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
            q.shape[:-2], k.shape[:-2], leading
        )
        q, k, v = (x.expand(*leading, *x.shape[-2:]) for x in (q, k, v))
    mask = None if is_causal else mask
    if q.is_cuda and not _BACKENDS and may_look():
        _BACKENDS.append(find_backend(q, k, v, mask, dropout_p, is_causal))
    return functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
    )


def is_causal_mask(mask: torch.Tensor, rows: int, columns: int) -> bool:
    """Tell whether a mask hides exactly what lies in the future, and nothing else."""
    if rows != columns or tuple(mask.shape[-2:]) != (rows, columns):
        return False
    flat = mask.reshape(-1, rows, columns)
    seen = torch.ones(rows, columns, dtype=torch.bool, device=mask.device).tril()
    if mask.dtype == torch.bool:
        return bool((flat == seen).all())
    return bool((flat.masked_fill(~seen, 0) == 0).all() and (flat[:, ~seen] <= HUGE).all())


_BACKENDS: list[str] = []
"""What the training's first fused attention on a GPU ran on."""


def backend_words() -> str:
    """Return what the fused attention ran on, where a GPU chooses; empty elsewhere."""
    return f", on {_BACKENDS[0]}" if _BACKENDS else ""


def find_backend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001
) -> str:
    """Return the backend that torch takes, in words; of the slow one with the reason."""
    name, why = backend_of(q, k, v, mask, dropout_p, is_causal)
    return f"the slow math backend, since {why}" if why else f"{name}_attention"


def _as_mask(kind: str, value: Any, filler: Any, q: torch.Tensor) -> torch.Tensor:
    """Return what the operator takes: True for visible positions, or numbers to add."""
    if kind == "add":
        mask: torch.Tensor = value.to(q.dtype)
        return mask
    if filler == -math.inf:
        visible: torch.Tensor = ~value.bool()
        return visible
    limit = max(float(filler), torch.finfo(q.dtype).min)
    return torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(value.bool(), limit)


def _both(one: torch.Tensor, other: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    if one.dtype == torch.bool and other.dtype == torch.bool:
        return one & other
    added = [
        torch.zeros((), dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)
        if mask.dtype == torch.bool
        else mask
        for mask in (one, other)
    ]
    return added[0] + added[1]
