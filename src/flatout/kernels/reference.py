"""What the kernels must compute, written plainly with torch."""

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
