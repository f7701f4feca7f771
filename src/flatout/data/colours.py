"""Brightness, contrast, saturation and hue of Pillow's, put off, done for a whole batch in torch.

Pillow blends a picture of bytes with a degenerate one: black, its mean grey, or its own grey. With
whole numbers and one product and one sum in single precision, torch does the same to the bit
(`Blend.c` and `Convert.c` of Pillow 13; without fused multiplication and addition, as its wheels
for x86-64 are built).
"""

from collections.abc import Sequence
from typing import TypeAlias

import torch

from flatout.data.hue import turned
from flatout.data.sending import sent

Colour: TypeAlias = tuple[str, float]
"""Name of one of Pillow's enhancements, and its factor; or `HUE`, and what is added to it."""
Colours: TypeAlias = tuple[Colour, ...]
"""What was done to one picture, in order."""
ENHANCEMENTS = ("Brightness", "Contrast", "Color")
"""Classes of `PIL.ImageEnhance` that are put off."""
HUE = "Hue"
"""The way through the mode HSV, with something added to the hue."""
AT_ONCE = 32
"""Pictures whose hue is turned at a time: each of their pixels takes some 60 bytes meanwhile."""
GREY_WEIGHTS = (19595, 38470, 7471)
"""Red, green and blue in grey, as parts of 65,536 (ITU-R 601-2, rounded as Pillow rounds them)."""
GREY_HALF = 0x8000
CHANNELS = 3


def coloured(
    pictures: torch.Tensor, axis: int, colours: Sequence[Colours], *, has_batch: bool = True
) -> torch.Tensor:
    """Return the pictures as Pillow would have made them, on their device.

    Args:
        pictures: uint8, red, green and blue along `axis`; the first axis is the batch, if any.
        axis: where the channels are.
        colours: one sequence for each picture of the batch.
        has_batch: whether there is a batch's axis.
    """
    whole = pictures if has_batch else pictures[None]
    place = axis if has_batch else axis + 1
    made = whole.movedim(place, -1).clone()
    for number in range(max(map(len, colours), default=0)):
        for kind in (*ENHANCEMENTS, HUE):
            _apply(made, kind, [_at(one, number, kind) for one in colours])
    back = made.movedim(-1, place)
    return back if has_batch else back[0]


def _at(colours: Colours, number: int, kind: str) -> float | None:
    """Return the factor of a picture's change of that number, None for another kind."""
    if number >= len(colours) or colours[number][0] != kind:
        return None
    return colours[number][1]


def _apply(pictures: torch.Tensor, kind: str, factors: Sequence[float | None]) -> None:
    """Change those pictures in place that have a factor; channels last."""
    places = [place for place, factor in enumerate(factors) if factor is not None]
    if not places:
        return
    rows = sent(torch.tensor(places), pictures.device)
    chosen = pictures[rows]
    dtype = torch.uint8 if kind == HUE else torch.float32
    factor = torch.tensor([x for x in factors if x is not None], dtype=dtype)
    there = sent(factor, pictures.device)
    if kind == HUE:
        parts = zip(*(torch.split(x, AT_ONCE) for x in (rows, chosen, there)), strict=True)
        for few, part, shift in parts:
            pictures[few] = turned(part, shift)
        return
    pictures[rows] = blended(_degenerate(chosen, kind), chosen, there)


def blended(degenerate: torch.Tensor, pictures: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return Pillow's `blend(degenerate, picture, factor)` for each picture.

    Args:
        degenerate: int16, of a shape that broadcasts to that of the pictures.
        pictures: uint8, the first axis is the batch.
        factor: float32, one for each picture.
    """
    sides = [-1] + [1] * (pictures.dim() - 1)
    apart = (pictures.to(torch.int16) - degenerate).float()
    # Two roundings, as in C: no addcmul or lerp, which a device may fuse.
    value = degenerate.float() + factor.view(sides) * apart
    # Between 0 and 1 nothing can overflow; beyond, Pillow clips. To bytes both cut off the rest.
    return value.clamp_(0.0, 255.0).to(torch.uint8)


def _degenerate(pictures: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "Brightness":
        return torch.zeros((1,) * pictures.dim(), dtype=torch.int16, device=pictures.device)
    grey = _grey(pictures)
    if kind == "Color":
        return grey.to(torch.int16)
    count = grey[0].numel()
    total = grey.flatten(1).sum(dim=1, dtype=torch.int64)
    # The mean and a half, cut off, in whole numbers: a device may round a quotient otherwise.
    mean = (2 * total + count) // (2 * count)
    return mean.to(torch.int16).view([-1] + [1] * (pictures.dim() - 1))


def _grey(pictures: torch.Tensor) -> torch.Tensor:
    red, green, blue = (
        pictures[..., place].to(torch.int32) * weight for place, weight in enumerate(GREY_WEIGHTS)
    )
    return ((red + green + blue + GREY_HALF) >> 16)[..., None]
