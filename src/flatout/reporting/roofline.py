"""The report of `roofline`: the device's ceilings, and the products of a step below them.

`roofline_svg` is the plot: operations a second over operations a byte, both in powers.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from flatout.records.messages import (
    ENGLISH,
    Messages,
    Sentence,
    Text,
    joined,
    messages,
    times,
    words,
)
from flatout.records.roofline import Product, ProductAdvice, Roofline
from flatout.records.units import format_bytes, format_ms, format_rate, format_share, with_prefix
from flatout.reporting.blocks import (
    UNKNOWN,
    Block,
    Facts,
    Next,
    Section,
    Table,
    escaped,
    known_columns,
    markdown_lines,
    report,
    safe,
)
from flatout.reporting.templates import render

MOST_ROWS = 20
"""Rows shown; all of them are in the JSON."""
LITTLE = 0.03
"""When less than this part of the step is to gain at the products, look elsewhere."""
LEAST_GAIN = 1.02
"""What gains less is not worth a change, as in the rule of `flatout tune`."""
SHORT = {
    "float32": "fp32",
    "float64": "fp64",
    "float16": "fp16",
    "bfloat16": "bf16",
    "forward": "fwd",
    "backward": "bwd",
}
"""What a narrow column holds."""
LABELS = "roofline.label_"
CHANNELS = "channels "
"""What both layouts of a convolution begin with."""
UNITS = {"TFLOP/s": 1e12, "GFLOP/s": 1e9, "MFLOP/s": 1e6}
WIDTH, HEIGHT = 640, 420
LEFT, RIGHT, TOP, BOTTOM = 92, 16, 36, 44
LEAST_RADIUS, MOST_RADIUS = 3.0, 14.0
ROOM = 1.6
"""Room beyond the outermost points, as a factor: a point on the frame looks cut."""


def format_flops(count: float) -> str:
    """Render a number of floating-point operations with three significant figures.

    >>> format_flops(3.1e12), format_flops(286_720), format_flops(12)
    ('3.10 TFLOP', '287 kFLOP', '12.0 FLOP')
    """
    value, prefix = with_prefix(count)
    return f"{format_rate(value)} {prefix}FLOP"


def headline(found: Roofline) -> Sentence:
    """Return the answer in one sentence or two."""
    ceilings = found.ceilings
    if not found.workload:
        fastest = max(ceilings.gemm_flops_per_s, key=lambda name: ceilings.gemm_flops_per_s[name])
        return words(
            "roofline.of_device",
            device=ceilings.device_name,
            rate=format_flops(ceilings.gemm_flops_per_s[fastest]),
            dtype=fastest,
            memory=format_bytes(ceilings.memory_bytes_per_s),
            ridge=format_rate(ceilings.ridge(fastest)),
        )
    if not found.products:
        return words("roofline.no_matrices", workload=found.workload)
    if not any(product.ms for product in found.products):
        return words("roofline.none_timed", n=str(len(found.products)))
    step_ms = found.step_ms or 0.0
    share = found.products_ms / step_ms if step_ms else 0.0
    gain = found.recoverable_ms / step_ms if step_ms else 0.0
    return words(
        "roofline.at_roof" if gain < LITTLE else "roofline.below_roof",
        share=format_share(share),
        time=format_ms(step_ms),
        gain=format_ms(found.recoverable_ms),
    )


def facts(found: Roofline) -> Iterator[tuple[str, Text]]:
    """Yield the ceilings of the device: the name of the label, and the words."""
    ceilings = found.ceilings
    what: list[Text] = [ceilings.device_kind]
    if ceilings.processors:
        what.append(words("roofline.processors", n=str(ceilings.processors)))
    elif ceilings.device_kind == "cpu":
        what.append(words("roofline.threads", n=str(ceilings.threads)))
    peaks = []
    for dtype, peak in ceilings.gemm_flops_per_s.items():
        rate, ridge = format_flops(peak), format_rate(ceilings.ridge(dtype))
        peaks.append(words("roofline.peak", dtype=dtype, rate=rate, ridge=ridge))
    copy, triad = map(format_bytes, (ceilings.copy_bytes_per_s, ceilings.triad_bytes_per_s))
    yield "device", words("roofline.device", name=ceilings.device_name, what=tuple(what))
    yield "products", tuple(peaks)
    yield "memory", words("roofline.memory", copy=copy, triad=triad)
    if ceilings.to_device_bytes_per_s and ceilings.from_device_bytes_per_s:
        there = format_bytes(ceilings.to_device_bytes_per_s)
        back = format_bytes(ceilings.from_device_bytes_per_s)
        yield "host", words("roofline.host", there=there, back=back)
    for dtype, why in ceilings.missing.items():
        yield "not_known", words("joint.because", one=dtype, other=why)
    if not ceilings.is_sound:
        yield "trust", words("roofline.unsound")


def beyond_table(found: Roofline) -> Iterator[tuple[str, Text]]:
    """Yield what the table does not show, what to change, and what to know: label and words."""
    if others := found.products[MOST_ROWS:]:
        spent_ms = sum(product.step_ms or 0.0 for product in others)
        yield "note", words("roofline.smaller", n=str(len(others)), time=format_ms(spent_ms))
    if found.attention_flops:
        yield "note", words("roofline.attention", flops=format_flops(found.attention_flops))
    yield from (("advice", advice_words(advice, found)) for advice in found.advice)
    yield from (("note", note) for note in found.notes)


def advice_words(advice: ProductAdvice, found: Roofline) -> Sentence:
    """Return one piece of advice with its foreseen and its measured gain."""
    count = len(advice.products)
    text = words(
        "roofline.foreseen",
        what=advice.what,
        products=words(f"roofline.{'product' if count == 1 else 'products'}", n=str(count)),
        ratio=times(advice.predicted_ratio),
    )
    if advice.measured_ratio is None or advice.saved_ms is None:
        return words("roofline.not_measured", text=text)
    text = words("roofline.measured", text=text, ratio=times(advice.measured_ratio))
    if advice.measured_ratio < LEAST_GAIN:
        return words("roofline.leave", text=text)
    saved: Text = words("roofline.saved", time=format_ms(advice.saved_ms))
    if found.step_ms:
        share = format_share(advice.saved_ms / found.step_ms)
        saved = words("gpu.reason", name=saved, share=share)
    name = "roofline.gains_samples" if advice.kind == "batch" else "roofline.gains"
    return words(name, text=text, saved=saved)


def next_command(found: Roofline) -> str:
    """Return what to type next."""
    return f"flatout tune {found.workload}" if found.workload else "flatout roofline train.py"


def size_words(product: Product) -> Text:
    """Return the sizes of a product.

    >>> from dataclasses import replace
    >>> one = Product(operator="mm", m=2, n=3, k=4, batch=1, dtype="float32", layout="NN",
    ...     role="forward", count=1, flops=48, bytes=104, aligned_bytes=4)
    >>> size_words(one), size_words(replace(one, batch=8))
    ('2x3x4', '8 of 2x3x4')
    """
    sizes = f"{product.m}x{product.n}x{product.k}"
    return sizes if product.batch == 1 else words("roofline.of", n=str(product.batch), sizes=sizes)


def table_of(found: Roofline, *more: str) -> Table:
    """Return the products, with more columns; sizes are rows, columns and what is summed over."""
    most = max(found.ceilings.gemm_flops_per_s.values())
    unit = next((name for name, size in UNITS.items() if most >= size), "MFLOP/s")
    columns = (
        *("product", "role", "as", "calls", "intensity", unit),
        *("roof", "align", "step", "gain", "tiles", "waves", *more),
    )
    cells = [_cells(product, found, unit) for product in found.products[:MOST_ROWS]]
    rows = tuple(tuple(row[name] for name in columns) for row in cells)
    return known_columns(Table(columns=columns, rows=rows))


def _cells(product: Product, found: Roofline, unit: str) -> dict[str, Text]:
    """Return the cells of a product, by column."""
    roof = found.ceilings.reachable(product.dtype, product.intensity)
    gain = product.recoverable_ms(found.ceilings)
    is_conv = product.operator.startswith("convolution")
    sizes = size_words(product)
    layout = product.layout.removeprefix(CHANNELS)
    rate = product.flops_per_s
    return {
        "product": words("roofline.convolution", sizes=sizes) if is_conv else sizes,
        "role": SHORT.get(product.role, product.role),
        "as": f"{SHORT.get(product.dtype, product.dtype)} {layout}",
        "calls": f"{product.count:g}",
        "intensity": format_rate(product.intensity),
        unit: format_rate(rate / UNITS[unit]) if rate else UNKNOWN,
        "roof": format_rate(roof / UNITS[unit]) if roof else UNKNOWN,
        "align": f"{product.aligned_bytes} B",
        "step": _share(found.share(product)),
        "gain": UNKNOWN if gain is None else format_ms(gain),
        "tiles": _share(product.tile_share),
        "waves": _share(product.wave_share),
        "flop": format_flops(product.flops),
    }


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else format_share(value)


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis, in powers of ten."""

    low: float
    high: float
    start: float
    length: float
    """Below zero for an axis that goes up."""

    def place(self, value: float) -> float:
        """Return where a value is."""
        part = math.log(value / self.low) / math.log(self.high / self.low)
        return round(self.start + self.length * part, 1)

    def powers(self) -> list[float]:
        """Return the powers of ten on it.

        >>> Axis(0.5, 200.0, 0, 100).powers()
        [1.0, 10.0, 100.0]
        """
        first, last = math.ceil(math.log10(self.low)), math.floor(math.log10(self.high))
        return [10.0**power for power in range(first, last + 1)]


def roofline_svg(found: Roofline, language: str = ENGLISH) -> str:
    """Return the plot as one SVG file: it needs no script, no font and no network."""
    say, ceilings = messages(language), found.ceilings
    dots = [product for product in found.products if product.flops_per_s]
    ridges = {dtype: ceilings.ridge(dtype) for dtype in ceilings.gemm_flops_per_s}
    seen = [*ridges.values(), *(product.intensity for product in dots)]
    across = Axis(min(seen) / 10, max(seen) * 4, LEFT, WIDTH - LEFT - RIGHT)
    rates = [*ceilings.gemm_flops_per_s.values(), *(product.flops_per_s or 0.0 for product in dots)]
    least = min([across.low * ceilings.memory_bytes_per_s, *rates])
    up = Axis(least / ROOM, max(rates) * ROOM, HEIGHT - BOTTOM, TOP + BOTTOM - HEIGHT)
    # A roof goes up along the memory's rate, then it is flat.
    start = max(across.low, up.low / ceilings.memory_bytes_per_s)
    roofs = []
    for dtype, peak in ceilings.gemm_flops_per_s.items():
        left = (start, start * ceilings.memory_bytes_per_s)
        corners = (left, (ridges[dtype], peak), (across.high, peak))
        points = " ".join(f"{across.place(x)},{up.place(y)}" for x, y in corners)
        roofs.append({"dtype": dtype, "points": points, "label_y": up.place(peak) - 6})
    return render(
        "roofline.svg.j2",
        {
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
            "say": say,
            "title": headline(found),
            "description": _description(found, dots),
            "roofs": roofs,
            "dots": [_dot(product, found, across, up, say) for product in dots],
            "x_ticks": [(across.place(value), f"{value:g}") for value in across.powers()],
            "y_ticks": [(up.place(value), f"{format_flops(value)}/s") for value in up.powers()],
        },
    )


def _dot(
    product: Product, found: Roofline, across: Axis, up: Axis, say: Messages
) -> dict[str, str | float]:
    """Return a product as a dot, whose area is its part of the step."""
    share = min(found.share(product) or 0.0, 1.0)
    rate = product.flops_per_s or 0.0
    sizes = say.text(size_words(product))
    return {
        "x": across.place(product.intensity),
        "y": up.place(rate),
        "radius": round(max(LEAST_RADIUS, MOST_RADIUS * math.sqrt(share)), 1),
        "role": product.role,
        "told": f"{sizes} {product.role} {product.dtype}: {format_flops(rate)}/s",
    }


def _description(found: Roofline, dots: list[Product]) -> Sentence:
    """Return the plot in words, for those who do not see it."""
    ceilings = found.ceilings
    roofs = []
    for dtype, peak in ceilings.gemm_flops_per_s.items():
        rate, ridge = format_flops(peak), f"{ceilings.ridge(dtype):.3g}"
        roofs.append(words("roofline.roof", dtype=dtype, rate=rate, ridge=ridge))
    return words("roofline.description", roofs=joined(*roofs), n=str(len(dots)))


def render_roofline(found: Roofline, *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report: the answer, the ceilings, the products, what to change, what to type."""
    blocks = (headline(found), *_numbers(found), Next(command=next_command(found)))
    return report(blocks, messages(language), width)


def roofline_markdown(found: Roofline, language: str = ENGLISH) -> str:
    """Return the report: the answer, the ceilings, the products, what to change, what to type."""
    say = messages(language)
    # Here is room for the operations of one call, too.
    numbers = Section(name="numbers", blocks=_numbers(found, "flop"))
    then = Section(name="next", blocks=(Next(command=next_command(found)),))
    lines = [f"# {escaped(say.text(headline(found)))}", ""]
    lines += [line for section in (numbers, then) for line in markdown_lines(section, say)]
    return safe("\n".join(lines[:-1]), say) + "\n"


def _numbers(found: Roofline, *more: str) -> tuple[Block, ...]:
    return (
        Facts(rows=tuple(facts(found)), labels=LABELS),
        *([table_of(found, *more)] if found.products else []),
        Facts(rows=tuple(beyond_table(found)), labels=LABELS),
    )
