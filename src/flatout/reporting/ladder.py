"""The ladder as a plot: one bar a lever, as a multiple of the baseline's speed, in SVG."""

import math
from collections import Counter
from dataclasses import dataclass

from flatout.core.ablation import Ablation
from flatout.reporting.ladder_rows import LadderRow, ladder_rows
from flatout.reporting.templates import render
from flatout.reporting.verdict import headline

WIDTH = 400
"""About a phone's width, so that nothing is scaled down there; each label stands above its bar."""
MARGIN = 8
ROW_HEIGHT = 48
TOP = 54
"""Room for the caption and the scale."""
MAX_LABEL = 36
"""Characters that leave room for the note at the right."""
BAR_HEIGHT = 14
MAX_TICKS = 6
ROOM_FOR_WHISKERS = 1.3
"""A whisker that reaches further than this beyond the longest bar is cut, without an end mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One row of the plot, in the units of the drawing."""

    row: LadderRow
    label: str
    y: float
    length: float
    whisker: str
    """The path of the interval; empty where there is none."""
    note: str
    """What stands at the right: the multiple and the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One line of the scale."""

    x: float
    label: str
    is_baseline: bool


def ladder_svg(ablation: Ablation) -> str:
    """Return the plot as one SVG file: it needs no script, no font and no network."""
    rows = [row for row in ladder_rows(ablation) if row.times_baseline is not None]
    top = _top(rows)
    names = Counter(row.lever for row in rows)
    bars = [
        _bar(row, _label(row, is_alone=names[row.lever] == 1), TOP + number * ROW_HEIGHT, top)
        for number, row in enumerate(rows)
    ]
    return render(
        "ladder.svg.j2",
        {
            "bars": bars,
            "ticks": _ticks(top),
            "width": WIDTH,
            "height": TOP + ROW_HEIGHT * len(rows) + MARGIN,
            "left": MARGIN,
            "top": TOP,
            "bar_height": BAR_HEIGHT,
            "title": headline(ablation),
            "description": _description(rows),
        },
    )


def _bar(row: LadderRow, label: str, y: float, top: float) -> Bar:
    assert row.times_baseline is not None
    return Bar(
        row=row,
        label=label,
        y=y,
        length=_x(row.times_baseline, top) - MARGIN,
        whisker=_whisker(row.whisker, y, top) if row.whisker else "",
        note=f"{row.times_baseline:.2f}x, {row.verdict}",
    )


def _whisker(interval: tuple[float, float], y: float, top: float) -> str:
    low, high = interval
    line = f"M{_x(low, top)} {y + 24}v8m0-4H{_x(min(high, top), top)}"
    return f"{line}m0-4v8" if high <= top else line


def _label(row: LadderRow, *, is_alone: bool) -> str:
    """Return the lever's name, with its settings where it was tried with several."""
    text = row.lever if is_alone else f"{row.lever} {row.settings}".strip()
    return text if len(text) <= MAX_LABEL else text[: MAX_LABEL - 3] + "..."


def _top(rows: list[LadderRow]) -> float:
    """Return the end of the scale: the longest whisker, unless that would squash the bars."""
    longest = max([1.0, *(row.times_baseline or 0.0 for row in rows)])
    ends = [row.whisker[1] for row in rows if row.whisker]
    return max(longest, min(max(ends, default=0.0), ROOM_FOR_WHISKERS * longest))


def _x(times: float, top: float) -> float:
    return round(MARGIN + (WIDTH - 2 * MARGIN) * times / top, 1)


def _ticks(top: float) -> list[Tick]:
    """Return round steps from 0 to the end of the scale, with the baseline always among them."""
    step = _round_step(top / MAX_TICKS)
    values = [step * i for i in range(math.floor(top / step + 1e-9) + 1)]
    if not any(math.isclose(value, 1.0) for value in values):
        values.append(1.0)
    return [
        Tick(x=_x(value, top), label=f"{value:g}x", is_baseline=math.isclose(value, 1.0))
        for value in values
    ]


def _round_step(least: float) -> float:
    """Return the smallest of 0.1, 0.2, 0.5, 1, 2, 5, ... that is not below `least`.

    >>> _round_step(0.37), _round_step(0.1), _round_step(1.7)
    (0.5, 0.1, 2.0)
    """
    power = 10.0 ** math.floor(math.log10(least) + 1e-9)
    return next(power * m for m in (1.0, 2.0, 5.0, 10.0) if power * m >= least - 1e-9)


def _description(rows: list[LadderRow]) -> str:
    """Return the plot in words, for those who do not see it."""
    parts = [f"{row.lever}: {row.times_baseline:.2f} times, {row.verdict}" for row in rows]
    return "Speed as a multiple of the baseline. " + "; ".join(parts) + "."
