"""Bytes to normalised floats, a whole batch at once: what ToTensor and Normalize do per sample."""

from collections.abc import Sequence

import numpy as np
import torch

from flatout.data.sending import sent

BLOCK = 32_767
"""Floats of one block: converting and scaling then both work in the second-level cache, and torch
leaves a block to one thread (its grain is 32768 elements): on a busy machine two threads that wait
for each other after every block took 40 times as long."""
DEPTH = 255.0
"""Largest value of a byte: what ToTensor divides by."""


def normalised(images: torch.Tensor, mean: Sequence[float], std: Sequence[float]) -> torch.Tensor:
    """Return `(images / 255 - mean) / std` in float32, on the device of the images.

    Equal to normalising each sample up to float rounding: one product and one sum instead of two
    quotients and a difference.

    Args:
        images: uint8, batch x height x width x channels, contiguous.
        mean: of each channel, in [0, 1] units.
        std: likewise.

    Returns:
        Batch x channels x height x width in channels_last memory.

    Raises:
        ValueError: if the images are no such batch, or do not have as many channels as `mean`.
    """
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise ValueError(f"uint8 of 4 dimensions is needed, not {images.dtype} of {images.dim()}")
    if not images.shape[-1] == len(mean) == len(std):
        raise ValueError(f"{images.shape[-1]} channels, {len(mean)} means, {len(std)} deviations")
    scale, shift = scale_and_shift(mean, std)
    if images.device.type != "cpu":
        scale, shift = sent(scale, images.device), sent(shift, images.device)
        return torch.addcmul(shift, images.float(), scale).permute(0, 3, 1, 2)
    return _blockwise(images.contiguous(), scale, shift).permute(0, 3, 1, 2)


def scale_and_shift(
    mean: Sequence[float], std: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return by what a byte is multiplied, and what is then added, for each channel."""
    deviations = torch.tensor(std, dtype=torch.float64)
    scale = (1 / (DEPTH * deviations)).float()
    return scale, (-torch.tensor(mean, dtype=torch.float64) / deviations).float()


def _blockwise(images: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Normalise rows of pixels block by block, the constants laid out as long as a row."""
    count, height, width, channels = images.shape
    # Numpy's memory, because it asks for huge pages: fresh small ones cost as much as the maths.
    made = torch.from_numpy(np.empty((count, height, width, channels), np.float32))
    source, target = (whole.view(count * height, width * channels) for whole in (images, made))
    scales, shifts = scale.repeat(width), shift.repeat(width)
    rows = max(1, BLOCK // max(1, width * channels))
    for first in range(0, len(source), rows):
        block = target[first : first + rows]
        block.copy_(source[first : first + rows])
        torch.addcmul(shifts, block, scales, out=block)
    return made
