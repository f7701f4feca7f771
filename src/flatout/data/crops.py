"""Random crops of whole batches: where they lie is a function of seed, epoch and sample alone.

The boxes are drawn as torchvision's `RandomResizedCrop` and `RandomCrop` draw them, for all samples
of a batch at once and from a counter: nothing of it depends on workers, threads or batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Numbers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Uniforms: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]

TRIES = 10
"""Boxes that are drawn until one lies inside the image; torchvision's number."""
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
