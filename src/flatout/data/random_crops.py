"""Where the random crops of a batch are, and their pixels as normalised floats.

`boxes` draws them for a whole batch at once, as a function of seed, epoch and sample alone.
`undecoded` makes only the part of a JPEG that is cut out into pixels. `normalised` does for a whole
batch of bytes what ToTensor and Normalize do per sample.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from flatout.data.byte_batches.ring import sent
from flatout.data.images.decoders import Buffers
from flatout.kernels.region import can_decode, decode_region

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Uniforms: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

TRIES = 10
"""Boxes that are drawn until one is inside the image; torchvision's number."""
DRAWS = 4 * TRIES + 1
"""Numbers a sample draws: area, ratio, top and left for each try, and the flip."""
GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
2014): it turns a counter into bits that pass the usual tests of randomness."""
DOUBLE_BITS = 53
TOP, LEFT, HEIGHT, WIDTH, FLIP = range(5)
"""Columns of a box."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Crops:
    """What becomes of each picture of a batch.

    With `mean` and `std` the pictures come as normalised float32, batch x channels x height x width
    in channels_last memory; without, as uint8, batch x height x width x channels.
    """

    side: int = 224
    """Height and width of what comes out."""
    scale: tuple[float, float] | None = (0.08, 1.0)
    """Least and largest share of the area that is cut out and resized; None cuts a window of `side`
    by `side` pixels, and resizes nothing."""
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Least and largest width over height."""
    flip_share: float = 0.5
    """Share of the pictures that are mirrored."""
    mean: tuple[float, ...] = ()
    """Of each channel, in [0, 1] units."""
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.side < 1:
            raise ValueError(f"side={self.side} must be at least 1")
        if self.scale is not None and not 0 < self.scale[0] <= self.scale[1] <= 1:
            raise ValueError(f"scale={self.scale} must be two shares, the smaller first, or None")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"ratio={self.ratio} must be two ratios, the smaller first")
        if not 0 <= self.flip_share <= 1:
            raise ValueError(f"flip_share={self.flip_share} must be between 0 and 1")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, 3):
            raise ValueError("give three means and three deviations, or neither")
        if not all(value > 0 for value in self.std):
            raise ValueError(f"std={self.std} must be above 0")


def uniforms(key: int, epoch: int, samples: Sequence[int] | Numbers) -> Uniforms:
    """Return `DRAWS` numbers in [0, 1) for each sample, whatever else is in the batch.

    >>> both = uniforms(0, 1, [7, 8])
    >>> bool((both[1] == uniforms(0, 1, [8])[0]).all()), both.shape
    (True, (2, 41))
    """
    start = _mixed(np.array([key % 2**64], dtype=np.uint64))
    start = _mixed(start ^ np.uint64(epoch % 2**64))
    each = _mixed(start ^ np.asarray(samples, dtype=np.int64).astype(np.uint64))
    counts = np.arange(1, DRAWS + 1, dtype=np.uint64)
    bits = _mixed(each[:, None] + counts * np.uint64(GOLDEN))
    found: Uniforms = (bits >> np.uint64(64 - DOUBLE_BITS)) * 2.0**-DOUBLE_BITS
    return found


def _mixed(bits: Any) -> Any:
    """Return SplitMix64's output for these counters."""
    bits = bits + np.uint64(GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(FIRST)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(SECOND)
    return bits ^ (bits >> np.uint64(31))


def boxes(crops: Crops, drawn: Uniforms, heights: Numbers, widths: Numbers) -> Numbers:
    """Return top, left, height, width and whether it is mirrored, a row a sample.

    They are drawn as torchvision's `RandomResizedCrop` and `RandomCrop` draw them, for all samples
    of a batch at once and from a counter: nothing of it depends on workers, threads or batches.

    Raises:
        ValueError: if a window is larger than its picture.
    """
    mirrored = drawn[:, -1] < crops.flip_share
    if crops.scale is None:
        where = _windows(crops.side, drawn, heights, widths)
    else:
        where = _resized(crops, drawn, heights, widths)
    return np.column_stack([*where, mirrored])


def _windows(side: int, drawn: Uniforms, heights: Numbers, widths: Numbers) -> tuple[Any, ...]:
    smallest = min(int(heights.min()), int(widths.min()))
    if smallest < side:
        raise ValueError(
            f"a picture is {smallest} pixels high or wide, the crop {side}; take a smaller side, "
            "or a scale, which resizes"
        )
    full = np.full(len(drawn), side)
    return _placed(drawn[:, 2], heights, full), _placed(drawn[:, 3], widths, full), full, full


def _resized(crops: Crops, drawn: Uniforms, heights: Any, widths: Any) -> tuple[Any, ...]:
    if crops.scale is None:
        raise AssertionError("called without a scale")
    tries = drawn[:, :-1].reshape(len(drawn), TRIES, 4)
    low, high = crops.scale
    areas = (heights * widths)[:, None] * (low + (high - low) * tries[..., 0])
    least, most = map(math.log, crops.ratio)
    ratios = np.exp(least + (most - least) * tries[..., 1])
    w = np.rint(np.sqrt(areas * ratios)).astype(np.int64)
    h = np.rint(np.sqrt(areas / ratios)).astype(np.int64)
    fits = (w > 0) & (h > 0) & (w <= widths[:, None]) & (h <= heights[:, None])
    taken = np.arange(len(drawn)), fits.argmax(axis=1)
    h, w = h[taken], w[taken]
    top = _placed(tries[..., 2][taken], heights, h)
    left = _placed(tries[..., 3][taken], widths, w)
    found = np.stack([top, left, h, w])
    inside = fits.any(axis=1)
    return tuple(np.where(inside, found, _central(crops, heights, widths)))


def _central(crops: Crops, heights: Any, widths: Any) -> Any:
    """Return the largest box in the middle whose ratio is allowed."""
    low, high = crops.ratio
    w = np.minimum(widths, np.rint(heights * high).astype(np.int64))
    h = np.minimum(heights, np.rint(widths / low).astype(np.int64))
    return np.stack([(heights - h) // 2, (widths - w) // 2, h, w])


def _placed(drawn: Any, whole: Any, part: Any) -> Any:
    """Return where a part begins; each place is as likely as the others."""
    return (drawn * (whole - part + 1)).astype(np.int64)


CHANNELS = 3
START = b"\xff\xd8"
FILL = 0xFF
FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Markers of what libjpeg decodes: baseline, extended and progressive; ITU-T T.81, table B.1."""
ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a length."""
FACTS = struct.Struct(">HBHHB")
"""Of a frame: length, bits, height, width, components; T.81, B.2.2."""
BITS = 8
BUFFERS = Buffers()


class Undecoded:
    """A picture of a packed store that was not decoded yet."""

    __slots__ = ("file", "shape", "whole")

    def __init__(
        self, file: bytes, shape: tuple[int, int, int], whole: Callable[[], torch.Tensor]
    ) -> None:
        self.file, self.shape, self.whole = file, shape, whole

    def part(self, box: Sequence[int]) -> torch.Tensor:
        """Return height x width x 3 bytes that are valid inside the box alone.

        The memory is used again once no one refers to it.
        """
        height, width, _ = self.shape
        edges = (box[LEFT], box[TOP], box[LEFT] + box[WIDTH], box[TOP] + box[HEIGHT])
        pixels = BUFFERS.take(height * width * CHANNELS)
        if not decode_region(self.file, (width, height), edges, pixels.ctypes.data, CHANNELS):
            return self.whole()
        return torch.from_numpy(pixels)[: height * width * CHANNELS].view(self.shape)


def undecoded(file: Any, whole: Callable[[], torch.Tensor]) -> Undecoded | None:
    """Return the file of a picture, to be decoded in parts; None where that cannot be.

    `whole` decodes all of it: the way where the library finds fault with the file.
    """
    if not isinstance(file, bytes) or not can_decode():
        return None
    size = jpeg_size(file)
    return None if size is None else Undecoded(file, (*size, CHANNELS), whole)


def jpeg_size(file: bytes) -> tuple[int, int] | None:
    """Return height and width from a JPEG's header; None for what is no plain colour JPEG."""
    at = len(START)
    while file.startswith(START) and at + 2 + FACTS.size <= len(file) and file[at] == FILL:
        marker = file[at + 1]
        length, bits, height, width, components = FACTS.unpack_from(file, at + 2)
        if marker in FRAMES:
            is_plain = bits == BITS and components == CHANNELS and height > 0 and width > 0
            return (height, width) if is_plain else None
        at += 1 if marker == FILL else 2 if marker in ALONE else 2 + length
    return None


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
