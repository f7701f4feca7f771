"""The roofline as a plot: operations a second over operations a byte, both in powers, in SVG."""

import math
from dataclasses import dataclass

from flatout.core.roofline import Product, Roofline
from flatout.reporting.roofline_words import headline, size_words
from flatout.reporting.templates import render
from flatout.reporting.text.limits import format_flops

WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 92, 16, 36, 44
LEAST_RADIUS, MOST_RADIUS = 3.0, 14.0
ROOM = 1.6
"""Room beyond the outermost points, as a factor: a point on the frame looks cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roof:
    """The line of one arithmetic: up along the memory's rate, then flat."""

    dtype: str
    points: str
    label_x: float
    label_y: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Dot:
    """One product; its area is its part of the step."""

    x: float
    y: float
    radius: float
    role: str
    told: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Both axes, in powers of ten."""

    low_x: float
    high_x: float
    low_y: float
    high_y: float

    def x(self, intensity: float) -> float:
        """Return the place of an intensity."""
        return round(LEFT + (WIDTH - LEFT - RIGHT) * _part(intensity, self.low_x, self.high_x), 1)

    def y(self, rate: float) -> float:
        """Return the place of a rate."""
        height = HEIGHT - TOP - BOTTOM
        return round(HEIGHT - BOTTOM - height * _part(rate, self.low_y, self.high_y), 1)


def roofline_svg(found: Roofline) -> str:
    """Return the plot as one SVG file: it needs no script, no font and no network."""
    dots = [product for product in found.products if product.flops_per_s]
    scale = _scale(found, dots)
    return render(
        "roofline.svg.j2",
        {
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
            "title": headline(found),
            "description": _description(found, dots),
            "roofs": _roofs(found, scale),
            "dots": [_dot(product, found, scale) for product in dots],
            "x_ticks": [
                (scale.x(value), f"{value:g}") for value in _powers(scale.low_x, scale.high_x)
            ],
            "y_ticks": [
                (scale.y(value), f"{format_flops(value)}/s")
                for value in _powers(scale.low_y, scale.high_y)
            ],
        },
    )


def _scale(found: Roofline, dots: list[Product]) -> Scale:
    ceilings = found.ceilings
    ridges = [ceilings.ridge(dtype) for dtype in ceilings.gemm_flops_per_s]
    seen_x = [*ridges, *(product.intensity for product in dots)]
    low_x, high_x = min(seen_x) / 10, max(seen_x) * 4
    rates = [*ceilings.gemm_flops_per_s.values(), *(product.flops_per_s or 0.0 for product in dots)]
    low_y = min([low_x * ceilings.memory_bytes_per_s, *rates]) / ROOM
    return Scale(low_x=low_x, high_x=high_x, low_y=low_y, high_y=max(rates) * ROOM)


def _roofs(found: Roofline, scale: Scale) -> list[Roof]:
    ceilings = found.ceilings
    start = scale.low_y / ceilings.memory_bytes_per_s
    roofs = []
    for dtype, peak in ceilings.gemm_flops_per_s.items():
        corners = [
            (max(scale.low_x, start), max(scale.low_x, start) * ceilings.memory_bytes_per_s),
            (ceilings.ridge(dtype), peak),
            (scale.high_x, peak),
        ]
        points = " ".join(f"{scale.x(x)},{scale.y(y)}" for x, y in corners)
        roofs.append(
            Roof(dtype=dtype, points=points, label_x=WIDTH - RIGHT, label_y=scale.y(peak) - 6)
        )
    return roofs


def _dot(product: Product, found: Roofline, scale: Scale) -> Dot:
    share = min(found.share(product) or 0.0, 1.0)
    radius = max(LEAST_RADIUS, MOST_RADIUS * math.sqrt(share))
    rate = product.flops_per_s or 0.0
    told = f"{size_words(product)} {product.role} {product.dtype}: {format_flops(rate)}/s"
    return Dot(
        x=scale.x(product.intensity),
        y=scale.y(rate),
        radius=round(radius, 1),
        role=product.role,
        told=told,
    )


def _part(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _powers(low: float, high: float) -> list[float]:
    """Return the powers of ten within two bounds.

    >>> _powers(0.5, 200.0)
    [1.0, 10.0, 100.0]
    """
    first, last = math.ceil(math.log10(low)), math.floor(math.log10(high))
    return [10.0**power for power in range(first, last + 1)]


def _description(found: Roofline, dots: list[Product]) -> str:
    """Return the plot in words, for those who do not see it."""
    roofs = [
        f"{dtype} {format_flops(rate)} a second from {found.ceilings.ridge(dtype):.3g} "
        "operations a byte"
        for dtype, rate in found.ceilings.gemm_flops_per_s.items()
    ]
    return f"Roofs: {'; '.join(roofs)}. {len(dots)} products below them."
