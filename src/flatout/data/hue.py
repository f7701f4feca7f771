"""Pillow's way to hue and back, done for a whole batch in torch.

The arithmetic of `Convert.c` of Pillow 13 (`rgb2hsv_row`, `hsv2rgb`), which mixes single and double
precision: what C keeps in a `float` is rounded to one here, too, so the bits are the same.
"""

from functools import cache

import torch

from flatout.data.division import over
from flatout.data.sending import sent

LEVELS = 256
SECTORS = 6.0
LARGEST = 255.0


def turned(pictures: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Return pictures with their hue moved on, as through Pillow's mode HSV.

    Args:
        pictures: uint8, red, green and blue along the last axis; the first axis is the batch.
        shift: uint8, one for each picture; added to the hue, which starts again after 255.
    """
    hue, saturation, value = apart(pictures)
    sides = [-1] + [1] * (hue.dim() - 1)
    return together(hue + shift.view(sides), saturation, value)


def apart(pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hue, saturation and value of pictures, uint8 each."""
    red, green, blue = pictures.unbind(-1)
    value, least = pictures.amax(-1), pictures.amin(-1)
    spread = (value - least).float()
    # Of grey nothing is left of these three, whatever they are divided by.
    divisor = spread.clamp(min=1.0)
    r, g, b = ((value - one).float() / divisor for one in (red, green, blue))
    on_green = (2.0 + r.double() - b.double()).float()
    on_blue = (4.0 + g.double() - r.double()).float()
    sixths = torch.where(red == value, b - g, torch.where(green == value, on_green, on_blue))
    share = (over(sixths.double(), SECTORS) + 1.0).fmod_(1.0).float()
    hue = (share.double() * LARGEST).to(torch.uint8)
    saturation = (spread / value.float().clamp(min=1.0)).double() * LARGEST
    return hue, saturation.to(torch.uint8), value


def together(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return pictures of red, green and blue along a new last axis, uint8."""
    sectors, rests = (sent(table, hue.device) for table in _sectors())
    places = hue.int()
    sector, rest = sectors[places], rests[places]
    share = over(saturation.double(), LARGEST).float()
    low = _part(value, share.double())
    falling = _part(value, (share * rest).double())
    rising = _part(value, share.double() * (1.0 - rest.double()))

    def chosen(second: int, *, lows: tuple[int, int], third: int) -> torch.Tensor:
        """Return a colour: it falls in one sector, is low in two, rises in one, else the value."""
        is_low = (sector == lows[0]) | (sector == lows[1])
        found = torch.where(is_low, low, value)
        found = torch.where(sector == second, falling, found)
        return torch.where(sector == third, rising, found)

    red = chosen(1, lows=(2, 3), third=4)
    green = chosen(3, lows=(4, 5), third=0)
    blue = chosen(5, lows=(0, 1), third=2)
    return torch.stack((red, green, blue), -1)


def _part(value: torch.Tensor, taken: torch.Tensor) -> torch.Tensor:
    """Return what is left of a value; halves are rounded up, as C's `round` does."""
    return (value.double() * (1.0 - taken) + 0.5).floor_().to(torch.uint8)


@cache
def _sectors() -> tuple[torch.Tensor, torch.Tensor]:
    """Return of each hue its sixth of the circle, and how far in it lies."""
    places = torch.arange(LEVELS, dtype=torch.float64) * SECTORS / LARGEST
    whole = places.floor()
    return (whole % SECTORS).to(torch.uint8), (places - whole).float()
