"""C = alpha * A @ B + beta * C with what follows it, in one kernel: bias, activation, residual.

    out = activation(alpha * a @ b + beta * c + bias) + residual

cuBLAS does the first part as well as anybody; what it lacks is the rest without another trip
through memory. On a GPU with Triton `gemm` runs as one kernel (`examples.gemm.launch`),
anywhere else as plain operations (`gemm_reference`). It has gradients, and torch.compile takes it
as one operator. What tiling is about: `docs/tiling.md`. Right on an H200; its
speed was not measured there yet.
"""

import functools
import importlib.util
import os
from typing import Any

import torch
import torch.nn.functional as F

ACTIVATIONS = ("none", "gelu", "relu2", "swiglu")
"""What may follow a product. `swiglu` reads the left half of the columns as the gate and the right
half as what it lets through, so its result is half as wide."""


def gemm_reference(
    product: torch.Tensor,
    *,
    c: torch.Tensor | None = None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `alpha * product + beta * c + bias`: what goes into the activation.

    With `beta` 0 the values of `c` do not matter, NaN included, as BLAS has it.
    """
    result = product if alpha == 1.0 else alpha * product
    if c is not None and beta != 0.0:
        result = result + beta * c
    return result if bias is None else result + bias


def activated(before: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the activation of what `gemm_reference` gave.

    >>> activated(torch.tensor([-1.0, 3.0]), "relu2")
    tensor([0., 9.])
    """
    if activation == "gelu":
        return F.gelu(before)
    if activation == "relu2":
        return F.relu(before).square()
    if activation == "swiglu":
        gate, up = before.chunk(2, dim=-1)
        return F.silu(gate) * up
    return before


def activation_gradient(
    before: torch.Tensor, gradient: torch.Tensor, activation: str
) -> torch.Tensor:
    """Return the gradient of what went into the activation, given that of what came out."""
    if activation == "gelu":
        result: torch.Tensor = torch.ops.aten.gelu_backward(gradient, before)
        return result
    if activation == "relu2":
        return gradient * 2.0 * F.relu(before)
    if activation == "swiglu":
        gate, up = before.chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        slope = sigmoid * (1.0 + gate * (1.0 - sigmoid))
        return torch.cat([gradient * up * slope, gradient * gate * sigmoid], dim=-1)
    return gradient


VARIANTS = ("auto", "tiled", "persistent", "reference")
"""Ways to compute it; `auto` takes what suits shape and device."""
KERNEL_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SCHEMA = (
    "(Tensor a, Tensor b, Tensor? c, Tensor? bias, Tensor? residual, float alpha, float beta, "
    "str activation, bool keeps, str variant) -> (Tensor, Tensor)"
)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    residual: torch.Tensor | None = None,
    variant: str = "auto",
) -> torch.Tensor:
    """Return `activation(alpha * a @ b + beta * c + bias) + residual`.

    Sums are kept in fp32. With `beta` 0 nothing of `c` is read, as BLAS has it. Under autocast the
    operands are cast as `a @ b` would cast them.

    Args:
        a: Of shape (..., K), any strides.
        b: Of shape (K, N), any strides: a linear layer gives `weight.t()`.
        c: As large as `a @ b`.
        alpha: Factor of the product.
        beta: Factor of `c`.
        bias: N numbers, added to each row.
        activation: `none`, `gelu` (exact), `relu2` (squared ReLU) or `swiglu`, for which the left
            half of the columns is the gate and the result is half as wide.
        residual: As large as the result, added at the end.
        variant: One of `VARIANTS`, for those who compare them.

    >>> a, b = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0], [-4.0]])
    >>> gemm(a, b, alpha=2.0, bias=torch.tensor([12.0]), activation="relu2")
    tensor([[4.]])
    """
    a, b, c, bias, residual = _cast(a, b, c, bias, residual)
    _check(a, b, c, bias, residual, activation, variant)
    count = a.shape[:-1].numel()
    rows = a.reshape(count, a.shape[-1])
    c = None if c is None or beta == 0.0 else c.reshape(count, b.shape[1])
    width = b.shape[1] // 2 if activation == "swiglu" else b.shape[1]
    flat = None if residual is None else residual.reshape(count, width)
    learns = any(t is not None and t.requires_grad for t in (a, b, c, bias, residual))
    keeps = activation != "none" and learns and torch.is_grad_enabled()
    out, _before = _operator(rows, b, c, bias, flat, alpha, beta, activation, keeps, variant)
    result: torch.Tensor = out.reshape(*a.shape[:-1], width)
    return result


def kernel_available(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether the Triton kernel can run here; else the plain operations do."""
    if dtype not in KERNEL_DTYPES or not _has_triton():
        return False
    return device.type == "cuda" or (device.type == "cpu" and _interprets())


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.library.custom_op("flatout::gemm", mutates_args=(), schema=SCHEMA)
def _operator(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str,
    keeps: bool,
    variant: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the result and, where it is to be kept for backward, what went into the activation."""
    if variant == "reference" or not kernel_available(a.device, a.dtype):
        before = gemm_reference(torch.mm(a, b), c=c, alpha=alpha, beta=beta, bias=bias)
        out = activated(before, activation)
        out = out if residual is None else out + residual
        return out, before if keeps else a.new_empty(0)
    from examples.gemm import launch

    columns = b.shape[1]
    width = columns // 2 if activation == "swiglu" else columns
    out = a.new_empty(a.shape[0], width)
    kept = a.new_empty(a.shape[0], columns) if keeps else None
    call = launch.KernelCall(
        a=a,
        b=b,
        c=c,
        bias=None if bias is None else bias.contiguous(),
        residual=residual,
        out=out,
        kept=kept,
        alpha=alpha,
        beta=beta,
        activation=activation,
    )
    if out.numel():
        launch.run(call, variant)
    return out, a.new_empty(0) if kept is None else kept


@_operator.register_fake
def _shapes(  # type: ignore[no-untyped-def]
    a, b, c, bias, residual, alpha, beta, activation, keeps, variant
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = b.shape[1]
    width = columns // 2 if activation == "swiglu" else columns
    kept = a.new_empty(a.shape[0], columns) if keeps else a.new_empty(0)
    return a.new_empty(a.shape[0], width), kept


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    a, b, c, bias, residual, alpha, beta, activation, _keeps, variant = inputs
    ctx.save_for_backward(a, b, output[1])
    ctx.set_materialize_grads(False)  # zeros for what was kept would be a table of their own
    ctx.has = tuple(tensor is not None for tensor in (c, bias, residual))
    ctx.alpha, ctx.beta, ctx.activation, ctx.variant = alpha, beta, activation, variant


def _backward(
    ctx: Any, gradient: torch.Tensor | None, kept: torch.Tensor | None
) -> tuple[Any, ...]:
    """Return the gradients: two products, and what is left of the rest.

    `kept` is the gradient of what went into the activation. Only a second backward has one: the
    first one's own gradients depend on that, too.
    """
    a, b, before = ctx.saved_tensors
    has_c, has_bias, has_residual = ctx.has
    inner: Any = gradient
    if gradient is not None and ctx.activation != "none":
        inner = activation_gradient(before, gradient, ctx.activation)
    if kept is not None:
        inner = kept if inner is None else inner + kept
    if inner is None:
        return (None,) * 10
    wants = ctx.needs_input_grad

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        given = (None, None, None, ctx.alpha, 0.0, "none", False, ctx.variant)
        result: torch.Tensor = _operator(left, right, *given)[0]
        return result

    return (
        product(inner, b.t()) if wants[0] else None,
        product(a.t(), inner) if wants[1] else None,
        ctx.beta * inner if has_c and wants[2] else None,
        inner.sum(0) if has_bias and wants[3] else None,
        gradient if has_residual and wants[4] else None,
        *(None,) * 5,
    )


_operator.register_autograd(_backward, setup_context=_remember)


def _cast(a: torch.Tensor, *others: torch.Tensor | None) -> tuple[Any, ...]:
    """Return the tensors in the dtype that autocast gives a product, where it is on."""
    if not torch.is_autocast_enabled(a.device.type):
        return (a, *others)
    dtype = torch.get_autocast_dtype(a.device.type)
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (a, *others))


def _check(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    variant: str,
) -> None:
    """Refuse what does not fit together.

    Raises:
        ValueError: with the shapes that were given.
    """
    for what, value, allowed in (
        ("activation", activation, ACTIVATIONS),
        ("variant", variant, VARIANTS),
    ):
        if value not in allowed:
            raise ValueError(f"there is no {what} {value!r}; it is one of {', '.join(allowed)}")
    if b.dim() != 2 or a.dim() < 1 or a.shape[-1] != b.shape[0]:
        raise ValueError(f"cannot multiply {tuple(a.shape)} by {tuple(b.shape)}")
    if activation == "swiglu" and b.shape[1] % 2:
        raise ValueError(f"swiglu needs an even number of columns, not {b.shape[1]}")
    columns = b.shape[1]
    width = columns // 2 if activation == "swiglu" else columns
    for what, tensor, shape in (
        ("c", c, (*a.shape[:-1], columns)),
        ("bias", bias, (columns,)),
        ("residual", residual, (*a.shape[:-1], width)),
    ):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"{what} has shape {tuple(tensor.shape)}, it must have {shape}")
    kinds = {t.dtype for t in (a, b, c, bias, residual) if t is not None}
    if len(kinds) > 1:
        raise ValueError(f"all tensors must have one dtype, not {', '.join(map(str, kinds))}")
