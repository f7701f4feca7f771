"""Scaled dot-product attention on a device that is not there: which kernel torch would choose.

Torch chooses in C++ by asking the device, and takes the slow formula where there is none. The
choice decides what is saved for backward, so it is made here, by the same conditions, and the
kernel's own operator is called: its shape function is there on every build.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

FLASH_CAPABILITY = (8, 0)
"""Flash attention runs from Ampere on: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
MAX_FLASH_HEAD = 256
FLASH_MULTIPLE = 8
"""Flash attention pads a head to a multiple of eight elements."""
BIAS_MULTIPLE = 16
"""The memory-efficient kernel pads the last dimension of a mask to a multiple of 16 elements."""
HALF = (torch.float16, torch.bfloat16)
RANK = 4


class Heads(NamedTuple):
    """Query, key and value with the mask, as the fused kernels take them."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None


def chosen_kernel(heads: Heads, capability: tuple[int, int], *, is_grouped: bool) -> str:
    """Return `flash`, `efficient` or `math`, as torch would on a device of that capability.

    cuDNN's kernel, which torch may prefer on the newest devices, saves what flash saves.
    """
    if heads.query.dim() != RANK:
        return "math"
    if torch._C._get_flash_sdp_enabled() and _suits_flash(heads, capability):
        return "flash"
    is_masked_gradient = heads.mask is not None and heads.mask.requires_grad
    if torch._C._get_mem_efficient_sdp_enabled() and not is_grouped:
        return "math" if is_masked_gradient and heads.query.dtype == torch.float64 else "efficient"
    return "math"


def _suits_flash(heads: Heads, capability: tuple[int, int]) -> bool:
    head = heads.query.shape[-1]
    return (
        capability >= FLASH_CAPABILITY
        and heads.query.dtype in HALF
        and heads.mask is None
        and head <= MAX_FLASH_HEAD
        and heads.value.shape[-1] == head
        and heads.key.shape[-1] == head
    )


def attend(  # noqa: PLR0913, PLR0917  the operator's own signature
    capability: tuple[int, int],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001, FBT002
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute `aten::scaled_dot_product_attention` by the kernel a real device would run."""
    heads = Heads(query, key, value, attn_mask)
    kernel = chosen_kernel(heads, capability, is_grouped=enable_gqa)
    if kernel == "flash":
        return _flash(heads, dropout_p, is_causal, scale)
    if kernel == "efficient":
        return _efficient(heads, dropout_p, is_causal, scale)
    out: Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return out


def _flash(heads: Heads, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:  # noqa: FBT001
    head = heads.query.shape[-1]
    missing = -head % FLASH_MULTIPLE
    parts: tuple[Tensor, ...] = heads[:3]
    if missing:
        scale = scale if scale is not None else head**-0.5
        parts = tuple(F.pad(part, (0, missing)) for part in parts)
    result: Any = torch.ops.aten._scaled_dot_product_flash_attention(
        *parts, dropout_p, is_causal, return_debug_mask=False, scale=scale
    )
    out: Tensor = result[0]
    return out[..., :head] if missing else out


def _efficient(heads: Heads, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:  # noqa: FBT001
    keeps_sums = any(part.requires_grad for part in heads[:3])
    result: Any = torch.ops.aten._scaled_dot_product_efficient_attention(
        *heads[:3], _bias(heads), keeps_sums, dropout_p, is_causal, scale=scale
    )
    out: Tensor = result[0]
    return out


def _bias(heads: Heads) -> Tensor | None:
    """Return the mask as numbers to add, padded and expanded as torch does it."""
    mask, query = heads.mask, heads.query
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        zero = torch.zeros((), dtype=query.dtype, device=query.device)
        mask = torch.where(mask, zero, torch.full_like(zero, float("-inf")))
    keys = mask.shape[-1]
    if keys % BIAS_MULTIPLE:
        mask = F.pad(mask, (0, -keys % BIAS_MULTIPLE))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], heads.key.shape[2])
