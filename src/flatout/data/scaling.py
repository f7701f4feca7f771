"""Pillow's resizing of colour pictures, put off and done for a whole batch in torch, to the bit.

The weights, the fixed point and the rounding are those of Pillow's `Resample.c`: a filter's weights
in double precision, divided by their sum, rounded to 22 bits; products and sums of whole numbers;
half a byte added and the fraction cut off, once across and once down. Which of the two comes first
depends on Pillow's version, and is found out by trying.

A picture travels as the window of pixels that its result is made of. Windows differ in size, so a
batch of them is one row of pixels, one window after the other.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from flatout.data.division import over
from flatout.data.sending import sent
from flatout.kernels.resample import Order, order_by

BITS = 22
"""Of a weight's fraction: 32 less 8 of a byte and 2 for sums beyond it."""
BILINEAR, BICUBIC, AREA = 2, 3, 4
REACH = {BILINEAR: 1.0, BICUBIC: 2.0, AREA: 0.5}
"""Pixels of the result that a filter reaches to each side, by Pillow's number of it. The other
filters of Pillow's use sines, which a device need not round as the processor does."""
CHANNELS = 3
AT_ONCE = 32
"""Pictures that are scaled together: crops of 300 x 300 to 224 x 224 take 75 MB of sums."""
Sides: TypeAlias = tuple[int, int]
Edges: TypeAlias = tuple[int, int, int, int]
Box: TypeAlias = tuple[float, float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one picture is made: what is scaled to which size, and how it is turned afterwards."""

    source: Sides
    """Width and height of the picture that the box was laid over."""
    box: Box
    """Left, top, right, bottom of what is scaled."""
    window: Edges
    """The pixels of the source that are there: all that are needed."""
    size: Sides
    """Width and height of the result."""
    kind: int
    """The filter, by Pillow's number."""
    is_down_first: bool
    """Whether the columns are scaled before the rows."""
    is_mirrored: bool = False
    is_upside_down: bool = False

    @property
    def pixels(self) -> int:
        """How many pixels the window has."""
        left, top, right, bottom = self.window
        return (right - left) * (bottom - top)


def window_of(source: Sides, box: Sequence[float], size: Sides, kind: int) -> Edges:
    """Return the pixels that a result is made of: a filter reaches beyond its box.

    >>> window_of((90, 90), (20, 30, 36, 46), (8, 8), BILINEAR)
    (17, 27, 39, 49)
    """
    across = REACH[kind] * max(1.0, (box[2] - box[0]) / size[0]) + 1
    down = REACH[kind] * max(1.0, (box[3] - box[1]) / size[1]) + 1
    return (
        max(0, math.floor(box[0] - across)),
        max(0, math.floor(box[1] - down)),
        min(source[0], math.ceil(box[2] + across)),
        min(source[1], math.ceil(box[3] + down)),
    )


def scaled(pixels: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """Return the pictures as Pillow would have made them, on the device of their pixels.

    Args:
        pixels: uint8, (pixels, 3): the windows one after the other, each row by row.
        cuts: one for each picture; their results have one size.

    Returns:
        uint8, (pictures, height, width, 3).
    """
    width, height = cuts[0].size
    sides = (len(cuts), height, width, CHANNELS)
    made = torch.empty(sides, dtype=torch.uint8, device=pixels.device)
    start, groups = 0, dict[tuple[int, bool], list[tuple[int, int]]]()
    for place, cut in enumerate(cuts):
        groups.setdefault((cut.kind, cut.is_down_first), []).append((place, start))
        start += cut.pixels
    for members in groups.values():
        for first in range(0, len(members), AT_ONCE):
            some = members[first : first + AT_ONCE]
            group = _Group([cuts[place] for place, _ in some], [at for _, at in some], pixels)
            places = torch.tensor([place for place, _ in some])
            made[sent(places, pixels.device)] = group.made()
    return _turned(made, cuts)


def _turned(pictures: torch.Tensor, cuts: Sequence[Cut]) -> torch.Tensor:
    """Turn those pictures round that are, in place."""
    for axis, name in ((2, "is_mirrored"), (1, "is_upside_down")):
        places = [place for place, cut in enumerate(cuts) if getattr(cut, name)]
        if places:
            rows = sent(torch.tensor(places), pictures.device)
            pictures[rows] = pictures[rows].flip(axis)
    return pictures


@dataclass(frozen=True, slots=True)
class _Taps:
    """What the places along one side of some pictures are sums of."""

    first: torch.Tensor
    """(pictures, places): the first pixel, from the window's edge."""
    last: torch.Tensor
    """(pictures, places): how many more there are."""
    weights: torch.Tensor
    """(pictures, places, taps), int32; beyond the last they are 0."""

    def pixels(self, tap: int) -> torch.Tensor:
        """Return the pixel of one tap, (pictures, places); beyond the last one the last."""
        return self.first + self.last.clamp(max=tap)

    def of(self, owner: torch.Tensor) -> "_Taps":
        """Return those of the owner of each line."""
        return _Taps(self.first[owner], self.last[owner], self.weights[owner])


class _Group:
    """Pictures of one filter whose passes come in one order."""

    def __init__(self, cuts: Sequence[Cut], starts: Sequence[int], pixels: torch.Tensor) -> None:
        self.pixels, self.is_down_first = pixels, cuts[0].is_down_first
        rows = [[*cut.window, *cut.source, start] for cut, start in zip(cuts, starts, strict=True)]
        whole = sent(torch.tensor(rows), pixels.device)
        # Pillow takes a box in single precision.
        boxes = sent(torch.tensor([cut.box for cut in cuts], dtype=torch.float32), pixels.device)
        left, top, right, bottom, width, height, self.starts = whole.T
        (across, down), kind = cuts[0].size, cuts[0].kind
        self.widths, self.heights = right - left, bottom - top
        # Known here, so that no size has to be asked of the device.
        self.all_columns = sum(cut.window[2] - cut.window[0] for cut in cuts)
        self.all_rows = sum(cut.window[3] - cut.window[1] for cut in cuts)
        widest = max(_count(kind, cut.box[2] - cut.box[0], across) for cut in cuts)
        tallest = max(_count(kind, cut.box[3] - cut.box[1], down) for cut in cuts)
        sides = _Side(width, boxes[:, 0], boxes[:, 2], left, widest)
        self.columns = _taps(sides, across, kind)
        self.rows = _taps(_Side(height, boxes[:, 1], boxes[:, 3], top, tallest), down, kind)

    def made(self) -> torch.Tensor:
        """Return the results, (pictures, height, width, 3)."""
        return self._down_then_across() if self.is_down_first else self._across_then_down()

    def _across_then_down(self) -> torch.Tensor:
        owner, line = _lines(self.heights, self.all_rows)
        start = (self.starts[owner] + line * self.widths[owner])[:, None]
        columns = self.columns.of(owner)
        narrow = _summed(columns.weights, lambda tap: self.pixels[start + columns.pixels(tap)])
        first = _before(self.heights)[:, None]
        return _summed(self.rows.weights, lambda tap: narrow[first + self.rows.pixels(tap)])

    def _down_then_across(self) -> torch.Tensor:
        owner, line = _lines(self.widths, self.all_columns)
        start, step = (self.starts[owner] + line)[:, None], self.widths[owner][:, None]
        rows = self.rows.of(owner)
        low = _summed(rows.weights, lambda tap: self.pixels[start + rows.pixels(tap) * step])
        first = _before(self.widths)[:, None]
        turned = _summed(self.columns.weights, lambda tap: low[first + self.columns.pixels(tap)])
        return turned.transpose(1, 2)


def _lines(counts: torch.Tensor, total: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return for each line of all windows whose it is, and its number there."""
    numbers = torch.arange(len(counts), device=counts.device)
    owner = torch.repeat_interleave(numbers, counts, output_size=total)
    place = torch.arange(total, device=counts.device)
    return owner, place - _before(counts)[owner]


def _before(counts: torch.Tensor) -> torch.Tensor:
    return counts.cumsum(0) - counts


def _summed(weights: torch.Tensor, taken: Callable[[int], torch.Tensor]) -> torch.Tensor:
    """Return the bytes of the weighted sums.

    Args:
        weights: int32, (..., taps).
        taken: bytes of one tap, of the weights' shape without its last axis, and further ones.
    """
    total: torch.Tensor | None = None
    for tap in range(weights.shape[-1]):
        values = taken(tap).to(torch.int32)
        weight = weights[..., tap]
        part = values * weight.view(*weight.shape, *[1] * (values.dim() - weight.dim()))
        total = part + (1 << BITS - 1) if total is None else total.add_(part)
    assert total is not None, "every filter has taps"
    return (total >> BITS).clamp_(0, 255).to(torch.uint8)


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of some pictures: (pictures,) each."""

    source: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    window: torch.Tensor
    """Where the window begins."""
    taps: int
    """That no place has more of."""


def _count(kind: int, length: float, to: int) -> int:
    """Return how many taps a place has at most; one more where single precision might decide."""
    return math.ceil(REACH[kind] * max(1.0, length / to) + 1e-3) * 2 + 1


def _taps(side: _Side, to: int, kind: int) -> _Taps:
    """Return `precompute_coeffs` and `normalize_coeffs_8bpc` of `Resample.c`, for some pictures."""
    # The difference of two floats, then doubles, in the order of the C code.
    scale = over((side.high - side.low).double(), to)[:, None]
    wide = scale.clamp(min=1.0)
    support = wide * REACH[kind]
    place = torch.arange(to, device=scale.device, dtype=torch.float64)
    center = side.low.double()[:, None] + (place + 0.5) * scale
    first = (center - support + 0.5).long().clamp(min=0)
    end = torch.minimum((center + support + 0.5).long(), side.source[:, None])
    step, total = 1.0 / wide, torch.zeros_like(center)
    found = []
    for tap in range(side.taps):
        at = ((tap + first).double() - center + 0.5) * step
        weight = torch.where(first + tap < end, _weight(kind, at), 0.0)
        total += weight
        found.append(weight)
    shares = torch.stack(found, -1) / torch.where(total == 0.0, 1.0, total)[..., None]
    rounded = shares * (1 << BITS) + torch.where(shares < 0, -0.5, 0.5)
    return _Taps(first - side.window[:, None], end - first - 1, rounded.to(torch.int32))


def _weight(kind: int, at: torch.Tensor) -> torch.Tensor:
    if kind == AREA:
        return ((at > -0.5) & (at <= 0.5)).double()
    x = at.abs()
    if kind == BILINEAR:
        return torch.where(x < 1.0, 1.0 - x, 0.0)
    a = -0.5
    near = ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return torch.where(x < 1.0, near, torch.where(x < 2.0, far, 0.0))


@functools.cache
def find_order() -> Order:
    """Return how this Pillow orders the passes, given a source's size and a result's.

    Raises:
        NotApplicable: if this Pillow resizes in another way.
    """
    return order_by(_is_same, REACH.keys())


def _is_same(image: Any, size: Sides, kind: int, box: Box, order: Order) -> bool:
    cut = Cut(
        source=image.size,
        box=box,
        window=(0, 0, *image.size),
        size=size,
        kind=kind,
        is_down_first=order(image.size, size),
    )
    dots = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    found = scaled(dots.view(-1, CHANNELS), [cut])
    expected: bytes = image.resize(size, kind, box).tobytes()
    return bytes(found.numpy()) == expected
