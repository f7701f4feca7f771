"""Division by a number as every processor rounds it."""

import torch


def over(values: torch.Tensor, number: float) -> torch.Tensor:
    """Return the values divided by a number, each rounded once, on any device.

    CUDA multiplies by the reciprocal where the divisor is a number of Python's, which may differ in
    the last bit (`BinaryDivTrueKernel.cu` of torch); by a tensor on the device it divides.
    """
    return values / torch.full((1,), number, dtype=values.dtype, device=values.device)
