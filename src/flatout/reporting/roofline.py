"""The report of `roofline`: the device's ceilings, and the products of a step below them.

`render_roofline` is for the terminal, `roofline_markdown` for a pull request or a wiki; they share
words and cells. `roofline_svg` is the plot: operations a second over operations a byte, both in
powers.
"""

import math
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
from flatout.records.units import format_bytes, format_ms, format_rate, format_share
from flatout.reporting.blocks import escaped, fenced, safe
from flatout.reporting.tables import (
    NOTHING,
    Column,
    display_width,
    format_flops,
    labelled,
    padded,
    table,
    wrapped,
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
CHANNELS = "channels "
"""What both layouts of a convolution begin with."""
UNITS = (("TFLOP/s", 1e12), ("GFLOP/s", 1e9), ("MFLOP/s", 1e6))


def headline(found: Roofline) -> Sentence:
    """Return the answer in one sentence or two."""
    ceilings = found.ceilings
    if not found.workload:
        fastest = max(ceilings.gemm_flops_per_s, key=lambda name: ceilings.gemm_flops_per_s[name])
        rate = format_flops(ceilings.gemm_flops_per_s[fastest])
        memory = format_bytes(ceilings.memory_bytes_per_s)
        return words(
            "roofline.of_device",
            device=ceilings.device_name,
            rate=rate,
            dtype=fastest,
            memory=memory,
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


def facts(found: Roofline) -> list[tuple[str, Text]]:
    """Return the ceilings of the device: the name of the label, and the words."""
    ceilings = found.ceilings
    what: list[Text] = [ceilings.device_kind]
    if ceilings.processors:
        what.append(words("roofline.processors", n=str(ceilings.processors)))
    elif ceilings.device_kind == "cpu":
        what.append(words("roofline.threads", n=str(ceilings.threads)))
    peaks = tuple(
        words(
            "roofline.peak",
            dtype=dtype,
            rate=format_flops(rate),
            ridge=format_rate(ceilings.ridge(dtype)),
        )
        for dtype, rate in ceilings.gemm_flops_per_s.items()
    )
    copy, triad = map(format_bytes, (ceilings.copy_bytes_per_s, ceilings.triad_bytes_per_s))
    rows: list[tuple[str, Text]] = [
        ("device", words("roofline.device", name=ceilings.device_name, what=tuple(what))),
        ("products", peaks),
        ("memory", words("roofline.memory", copy=copy, triad=triad)),
    ]
    if ceilings.to_device_bytes_per_s and ceilings.from_device_bytes_per_s:
        there = format_bytes(ceilings.to_device_bytes_per_s)
        back = format_bytes(ceilings.from_device_bytes_per_s)
        rows.append(("host", words("roofline.host", there=there, back=back)))
    for dtype, why in ceilings.missing.items():
        rows.append(("not_known", words("joint.because", one=dtype, other=why)))
    if not ceilings.is_sound:
        rows.append(("trust", words("roofline.unsound")))
    return rows


def columns(found: Roofline) -> tuple[Text, ...]:
    """Return the titles of the table; sizes are rows, columns and what is summed over."""
    unit, _ = _unit(found)
    first = ("product", "role", "as", "n", "intensity")
    last = ["roof", "align", "step", "gain"]
    last += ["tiles", "waves"] if found.ceilings.processors else []
    titles = [words(f"roofline.column_{name}") for name in (*first, *last)]
    return (*titles[: len(first)], unit, *titles[len(first) :])


def rows(found: Roofline) -> list[tuple[Text, ...]]:
    """Return the table's rows, the largest part of the step first."""
    return [_row(product, found) for product in found.products[:MOST_ROWS]]


def wide_columns(found: Roofline) -> tuple[Text, ...]:
    """Return the titles where there is room: with the operations of one call."""
    what, *others = columns(found)
    return (what, "FLOP", *others)


def wide_rows(found: Roofline) -> list[tuple[Text, ...]]:
    """Return the rows that go with them."""
    shown = zip(found.products, rows(found), strict=False)
    return [(what, format_flops(product.flops), *others) for product, (what, *others) in shown]


def beside(found: Roofline) -> list[Text]:
    """Return sentences on what the table does not show."""
    told: list[Text] = []
    if others := found.products[MOST_ROWS:]:
        spent_ms = sum(product.step_ms or 0.0 for product in others)
        told.append(words("roofline.smaller", n=str(len(others)), time=format_ms(spent_ms)))
    if found.attention_flops:
        flops = format_flops(found.attention_flops)
        told.append(words("roofline.attention", flops=flops))
    return told


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
    if not found.workload:
        return "flatout roofline train.py"
    return f"flatout tune {found.workload}"


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


def _row(product: Product, found: Roofline) -> tuple[Text, ...]:
    ceilings = found.ceilings
    _, unit = _unit(found)
    roof = ceilings.reachable(product.dtype, product.intensity)
    share, gain = found.share(product), product.recoverable_ms(ceilings)
    is_conv = product.operator.startswith("convolution")
    sizes = size_words(product)
    cells: list[Text] = [
        words("roofline.convolution", sizes=sizes) if is_conv else sizes,
        SHORT.get(product.role, product.role),
        f"{SHORT.get(product.dtype, product.dtype)} {product.layout.removeprefix(CHANNELS)}",
        f"{product.count:g}",
        format_rate(product.intensity),
        format_rate(product.flops_per_s / unit) if product.flops_per_s else NOTHING,
        format_rate(roof / unit) if roof else NOTHING,
        f"{product.aligned_bytes} B",
        format_share(share) if share is not None else NOTHING,
        format_ms(gain) if gain is not None else NOTHING,
    ]
    if ceilings.processors:
        shares = (product.tile_share, product.wave_share)
        cells += [NOTHING if value is None else format_share(value) for value in shares]
    return tuple(cells)


def _unit(found: Roofline) -> tuple[str, float]:
    """Return the unit of the rates, chosen for the largest."""
    most = max(found.ceilings.gemm_flops_per_s.values())
    return next(((name, size) for name, size in UNITS if most >= size), UNITS[-1])


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


def roofline_svg(found: Roofline, language: str = ENGLISH) -> str:
    """Return the plot as one SVG file: it needs no script, no font and no network."""
    say = messages(language)
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
            "say": say,
            "title": say.text(headline(found)),
            "description": say.text(_description(found, dots)),
            "roofs": _roofs(found, scale),
            "dots": [_dot(product, found, scale, say) for product in dots],
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


def _dot(product: Product, found: Roofline, scale: Scale, say: Messages) -> Dot:
    share = min(found.share(product) or 0.0, 1.0)
    radius = max(LEAST_RADIUS, MOST_RADIUS * math.sqrt(share))
    rate = product.flops_per_s or 0.0
    sizes = say.text(size_words(product))
    told = f"{sizes} {product.role} {product.dtype}: {format_flops(rate)}/s"
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


def _description(found: Roofline, dots: list[Product]) -> Sentence:
    """Return the plot in words, for those who do not see it."""
    roofs = [
        words(
            "roofline.roof",
            dtype=dtype,
            rate=format_flops(rate),
            ridge=f"{found.ceilings.ridge(dtype):.3g}",
        )
        for dtype, rate in found.ceilings.gemm_flops_per_s.items()
    ]
    return words("roofline.description", roofs=joined(*roofs), n=str(len(dots)))


LABELS = ("device", "products", "memory", "host", "not_known", "trust")
NUMBERS_FROM = 3
"""The first column of the table that holds numbers."""


def render_roofline(found: Roofline, *, width: int = 80, language: str = ENGLISH) -> str:
    """Return the report: the answer, the ceilings, the products, what to change, what to type."""
    say = messages(language)
    widest = max(display_width(say(f"roofline.label_{label}")) for label in LABELS)
    lines = [*wrapped(say.text(headline(found)), width), ""]
    for name, text in facts(found):
        lines += labelled(padded(say(f"roofline.label_{name}"), widest), say.text(text), width)
    if found.products:
        lines += ["", *_products(found, say)]
    for text in beside(found):
        lines += wrapped(say.text(text), width)
    told = [advice_words(advice, found) for advice in found.advice]
    for title, texts in (("advice", told), ("notes", found.notes)):
        lines += ["", say(f"roofline.title_{title}")] if texts else []
        for text in texts:
            lines += wrapped(say.text(text), width, indent="- ", hanging="  ")
    lines += ["", *labelled(say("label.next"), next_command(found), width)]
    return safe("\n".join(lines), say) + "\n"


def _products(found: Roofline, say: Messages) -> list[str]:
    titles = [
        Column(say.text(title), is_number=number >= NUMBERS_FROM)
        for number, title in enumerate(columns(found))
    ]
    return table(titles, [[say.text(cell) for cell in row] for row in rows(found)])


def roofline_markdown(found: Roofline, language: str = ENGLISH) -> str:
    """Return the report: the answer, the ceilings, the products, what to change, what to type."""
    say = messages(language)
    lines = [f"# {escaped(say.text(headline(found)))}", ""]
    for name, text in facts(found):
        lines.append(f"- {say(f'roofline.label_{name}')}: {escaped(say.text(text))}")
    if found.products:
        titles = [say.text(title) for title in wide_columns(found)]
        rule = ["---", "--:", *["---"] * 2, *["--:"] * (len(titles) - 4)]
        body = [[escaped(say.text(cell)) for cell in row] for row in wide_rows(found)]
        lines += ["", *(f"| {' | '.join(cells)} |" for cells in (titles, rule, *body)), ""]
    told = [advice_words(advice, found) for advice in found.advice]
    points = (*beside(found), *told, *found.notes)
    lines += [f"- {escaped(say.text(text))}" for text in points]
    lines += ["", say("roofline.next"), "", *fenced(next_command(found), "sh")]
    return safe("\n".join(lines), say) + "\n"
