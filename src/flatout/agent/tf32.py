"""Which fp32 arithmetic of a CUDA device is rounded to TF32, by torch's own switches."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MIN_CAPABILITY = (8, 0)
"""Compute capability from which NVIDIA devices have TF32 (Ampere)."""


def has_tf32(device: "torch.device") -> bool:
    """Return whether a device has TF32 at all."""
    import torch

    if device.type != "cuda" or torch.version.hip:
        return False
    return torch.cuda.get_device_capability(device) >= MIN_CAPABILITY


def allows(backend: str, operation: str) -> bool:
    """Return whether torch's switches allow TF32 for an operation of a backend.

    >>> allows("cuda", "matmul")
    False
    """
    import torch

    owner: Any = getattr(torch.backends, backend)
    switches = getattr(owner, operation, owner)
    if hasattr(switches, "fp32_precision"):
        return bool(switches.fp32_precision == "tf32")
    return bool(switches.allow_tf32)


def rounds_to_tf32(roots: Iterable["torch.nn.Module"]) -> bool:
    """Return whether any product of the roots' fp32 layers may be rounded to TF32.

    Torch lets cuDNN do so by default: on Ampere and later, an fp32 convolution is no fp32
    convolution, and two of its algorithms may differ by what TF32 leaves out, not by the order of
    a sum: channels_last moved the first gradients of a ResNet-50 by 0.34 on an H200.
    """
    import torch
    from torch import nn

    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d)
    for root in roots:
        for module in root.modules():
            weight = next(module.parameters(recurse=False), None)
            if weight is None or weight.dtype != torch.float32 or not has_tf32(weight.device):
                continue
            if isinstance(module, convolutions) and allows("cudnn", "conv"):
                return True
            if isinstance(module, nn.RNNBase) and allows("cudnn", "rnn"):
                return True
            # A parameter in any other module may be multiplied by the script itself.
            if not isinstance(module, convolutions) and allows("cuda", "matmul"):
                return True
    return False
