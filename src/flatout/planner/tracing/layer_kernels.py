"""Attention and recurrent layers on a device that is not there, as its kernels would allocate.

`attend` stands for scaled dot-product attention, `recurrent` for cuDNN's LSTM, GRU and plain
layers: torch dispatches both to kernels that a build without CUDA does not choose or hold.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flatout.planner.kernel_workspaces import Recurrent

FLASH_CAPABILITY = (8, 0)
"""Flash attention runs from Ampere on: aten/src/ATen/native/transformers/cuda/sdp_utils.cpp."""
CUDNN_CAPABILITIES = ((9, 0), (10, 0))
"""Where torch prefers cuDNN's kernel, same file; seen on an H200 with and without a mask."""
MAX_CUDNN_HEAD = 128
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
    """Return `cudnn`, `flash`, `efficient` or `math`, as torch would on that device."""
    if heads.query.dim() != RANK:
        return "math"
    if torch._C._get_cudnn_sdp_enabled() and _suits_cudnn(heads, capability):
        return "cudnn"
    if torch._C._get_flash_sdp_enabled() and _suits_flash(heads, capability):
        return "flash"
    is_masked_gradient = heads.mask is not None and heads.mask.requires_grad
    if torch._C._get_mem_efficient_sdp_enabled() and not is_grouped:
        return "math" if is_masked_gradient and heads.query.dtype == torch.float64 else "efficient"
    return "math"


def _suits_cudnn(heads: Heads, capability: tuple[int, int]) -> bool:
    return (
        capability in CUDNN_CAPABILITIES
        and heads.query.dtype in HALF
        and not (heads.mask is not None and heads.mask.requires_grad)
        and all(
            part.shape[-1] <= MAX_CUDNN_HEAD and part.shape[-1] % FLASH_MULTIPLE == 0
            for part in heads[:3]
        )
    )


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
    keeps_sums = any(part.requires_grad for part in heads[:3])
    result: Any
    if kernel == "cudnn":
        result = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *heads[:3], _additive(heads), keeps_sums, dropout_p, is_causal, scale=scale
        )
    elif kernel == "flash":
        result = [_flash(heads, dropout_p, is_causal, scale)]
    elif kernel == "efficient":
        result = torch.ops.aten._scaled_dot_product_efficient_attention(
            *heads[:3], _bias(heads), keeps_sums, dropout_p, is_causal, scale=scale
        )
    else:
        result = torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    out: Tensor = result[0]
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


def _additive(heads: Heads) -> Tensor | None:
    """Return the mask as numbers to add."""
    mask, query = heads.mask, heads.query
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero = torch.zeros((), dtype=query.dtype, device=query.device)
    return torch.where(mask, zero, torch.full_like(zero, float("-inf")))


def _bias(heads: Heads) -> Tensor | None:
    """Return the mask as numbers to add, padded and expanded as torch does it."""
    mask, query = _additive(heads), heads.query
    if mask is None:
        return None
    keys = mask.shape[-1]
    if keys % BIAS_MULTIPLE:
        mask = F.pad(mask, (0, -keys % BIAS_MULTIPLE))[..., :keys]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], heads.key.shape[2])


def linear(source: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `aten::linear` with the bias added in place, as torch does outside a trace.

    Where it is no single product with bias, aten/src/ATen/native/Linear.cpp adds out of place as
    soon as a dispatch mode looks on.
    """
    if bias is None or source.dim() < 3 or source.is_contiguous():
        whole: Tensor = torch.ops.aten.linear.default.decompose(source, weight, bias)
        return whole
    return torch.matmul(source, weight.t()).add_(bias)


ASSUMED = "cuDNN's workspace of recurrent layers is that of an H200"


class _Recurrent(torch.autograd.Function):
    """Allocate what cuDNN's recurrent forward and backward allocate, in its order."""

    @staticmethod
    def forward(
        ctx: Any, layer: Recurrent, kept_bytes: int, source: Tensor, *rest: Tensor
    ) -> tuple[Tensor, ...]:
        states, weights = rest[: _states(layer)], rest[_states(layer) :]
        dense = source.contiguous()
        output = source.new_empty((*source.shape[:-1], layer.directions * states[0].shape[-1]))
        finals = [state.new_empty(state.shape) for state in states]
        workspace = source.new_empty(layer.workspace_bytes(), dtype=torch.uint8)
        reserve = source.new_empty(kept_bytes, dtype=torch.uint8)
        del workspace, dense
        ctx.layer = layer
        ctx.save_for_backward(source, output, reserve, *states, *weights)
        return output, *finals

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        source, _, _, *rest = ctx.saved_tensors
        states, weights = rest[: _states(layer)], rest[_states(layer) :]
        dense, turned = source.contiguous(), gradients[0].contiguous()
        grads = [source.new_empty(source.shape), *(torch.empty_like(state) for state in states)]
        workspace = source.new_empty(layer.workspace_bytes(), dtype=torch.uint8)
        del workspace, dense, turned
        dense = source.contiguous()
        parts = _views_of_one(weights, weights[0].dtype)
        workspace = source.new_empty(layer.workspace_bytes(), dtype=torch.uint8)
        del workspace, dense
        return None, None, *grads, *parts


def _views_of_one(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return tensors of these shapes that lie in one buffer, as cuDNN wants the weights."""
    buffer = tensors[0].new_zeros(sum(tensor.numel() for tensor in tensors), dtype=dtype)
    parts, place = [], 0
    for tensor in tensors:
        parts.append(buffer[place : place + tensor.numel()].view_as(tensor))
        place += tensor.numel()
    return parts


def _states(layer: Recurrent) -> int:
    return 2 if layer.kind == "lstm" else 1


class _Cast(torch.autograd.Function):
    """Cast all weights into one buffer, as autocast does for cuDNN's layers."""

    @staticmethod
    def forward(ctx: Any, to: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.dtypes = [weight.dtype for weight in weights]
        return tuple(_views_of_one(weights, to))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        pairs = list(zip(gradients, ctx.dtypes, strict=True))
        last_first = [gradient.to(dtype) for gradient, dtype in reversed(pairs)]
        return None, *reversed(last_first)


def flatten_parameters(layer: Any) -> None:
    """Move the weights of a recurrent layer on the device into one buffer, as cuDNN wants them.

    Stands for `torch.nn.RNNBase.flatten_parameters`, which asks cuDNN for a device first.
    """
    weights = layer._flat_weights
    if not all(isinstance(weight, Tensor) and weight.is_cuda for weight in weights):
        return
    places = {weight.untyped_storage()._cdata for weight in weights}
    if len(places) < len(weights) or len({weight.dtype for weight in weights}) > 1:
        return
    with torch.no_grad():
        for weight, part in zip(weights, _views_of_one(weights, weights[0].dtype), strict=True):
            weight.data = part


def recurrent(kind: str, note: Any) -> Any:
    """Return what stands for `torch._VF.lstm` and its like; `note` gets what is assumed.

    Torch dispatches them to a kernel that a build without CUDA does not hold. Here an autograd
    function allocates the same tensors: outputs, cuDNN's reserve space and workspace, and in
    backward the gradients with the one buffer that holds those of all weights.
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
            weights = _Cast.apply(to, *weights)  # type: ignore[no-untyped-call]
            states = [state.to(to) for state in states]
            source = source.to(to)
        is_turned = batch_first and source.dim() == 3
        source = source.transpose(0, 1) if is_turned else source
        hidden, rows = states[-1].shape, source.shape[:-1].numel()
        batch = hidden[1] if len(hidden) == 3 else 1
        layer = Recurrent(
            kind=kind,
            steps=rows // batch,
            batch=batch,
            inner=source.shape[-1],
            hidden=hidden[-1],
            layers=layers,
            directions=2 if bidirectional else 1,
            element_bytes=source.element_size(),
        )
        width = layer.directions * states[0].shape[-1]
        masks = rows * width * (layers - 1) * layer.element_bytes if dropout else 0
        kept = layer.reserve_bytes() + masks if training else 0
        output, *finals = _Recurrent.apply(layer, kept, source, *states, *weights)  # type: ignore[no-untyped-call]
        return output.transpose(0, 1) if is_turned else output, *finals

    return run
