"""Attention and recurrent layers on a device that is not there, as its kernels would allocate.

`attend` stands for scaled dot-product attention, `recurrent` for cuDNN's LSTM, GRU and plain
layers: torch dispatches both to kernels that a build without CUDA does not choose or hold.
"""

from collections.abc import Sequence
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
    """Compute `aten::scaled_dot_product_attention` by the kernel a real device would run.

    Torch chooses in C++ by asking the device, and takes the slow formula where there is none. The
    choice decides what is saved for backward, so it is made here, by the same conditions, and the
    kernel's own operator is called: its shape function is there on every build.
    """
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


GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
"""Matrix products a cell computes for each unit."""
KEPT = {"lstm": 6, "gru": 5, "rnn_tanh": 2, "rnn_relu": 2}
"""Values kept for each unit and time step: its gates, and its states."""
ASSUMED = "cuDNN's reserve space of recurrent layers is assumed, not known"


class Layers(NamedTuple):
    """The settings of a recurrent layer."""

    kind: str
    layers: int
    directions: int
    hidden: int
    dropout: float
    is_training: bool
    batch_first: bool


class _Recurrent(torch.autograd.Function):
    """Allocate what cuDNN's recurrent forward and backward allocate."""

    @staticmethod
    def forward(ctx: Any, settings: Layers, source: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        states, weights = rest[: _states(settings)], rest[_states(settings) :]
        width = settings.directions * states[0].shape[-1]
        if settings.batch_first and source.dim() == 3:
            source = source.transpose(0, 1)
        steps = source.shape[:-1].numel()
        output = source.new_empty((*source.shape[:-1], width))
        finals = [state.new_empty(state.shape) for state in states]
        kept = KEPT[settings.kind] * settings.hidden * settings.directions * settings.layers
        masks = width * (settings.layers - 1) if settings.dropout else 0
        reserve = source.new_empty(
            (steps * (kept + masks) if settings.is_training else 0) * source.element_size(),
            dtype=torch.uint8,
        )
        ctx.settings = settings
        ctx.save_for_backward(source, output, reserve, *states, *weights)
        if settings.batch_first and source.dim() == 3:
            output = output.transpose(0, 1)
        return output, *finals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        settings = ctx.settings
        source, _, _, *rest = ctx.saved_tensors
        states, weights = rest[: _states(settings)], rest[_states(settings) :]
        if settings.batch_first and source.dim() == 3:
            gradients[0].transpose(0, 1).contiguous()  # as cuDNN's wrapper does
        grads = [torch.empty_like(source), *(torch.empty_like(state) for state in states)]
        buffer = weights[0].new_zeros(sum(weight.numel() for weight in weights))
        parts, place = [], 0
        for weight in weights:
            parts.append(buffer[place : place + weight.numel()].view_as(weight))
            place += weight.numel()
        if settings.batch_first and source.dim() == 3:
            grads[0] = grads[0].transpose(0, 1)
        return None, *grads, *parts


def _states(settings: Layers) -> int:
    return 2 if settings.kind == "lstm" else 1


def recurrent(kind: str, note: Any) -> Any:
    """Return what stands for `torch._VF.lstm` and its like; `note` gets what is assumed.

    Torch dispatches them to a kernel that a build without CUDA does not hold. Here an autograd
    function allocates the same tensors: outputs, cuDNN's reserve space, and in backward the
    gradients with the one buffer that holds those of all weights. The size of the reserve space is
    cuDNN's own secret and an estimate here: the gates, the cell and the hidden state of every time
    step and layer.
    """

    def run(source: Tensor, *args: Any) -> Any:
        note(ASSUMED)
        if isinstance(args[2], tuple | list):  # a packed sequence
            _, hx, weights, _, layers, dropout, training, bidirectional = args
            batch_first = False
        else:
            hx, weights, _, layers, dropout, training, bidirectional, batch_first = args
        states: Sequence[Tensor] = hx if isinstance(hx, tuple | list) else (hx,)
        if torch.is_autocast_enabled("cuda"):
            to = torch.get_autocast_dtype("cuda")
            source, states, weights = source.to(to), _cast(states, to), _cast(weights, to)
        first = states[-1]
        settings = Layers(
            kind, layers, 2 if bidirectional else 1, first.shape[-1], dropout, training, batch_first
        )
        output, *finals = _Recurrent.apply(settings, source, *states, *weights)  # type: ignore[no-untyped-call]
        return output, *finals

    return run


def _cast(tensors: Sequence[Tensor], to: torch.dtype) -> list[Tensor]:
    """Return the tensors as autocast hands them to cuDNN."""
    return [tensor.to(to) for tensor in tensors]
