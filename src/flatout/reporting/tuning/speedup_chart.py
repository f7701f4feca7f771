"""The ladder of a tuning as table cells (`ladder_rows`) and as a plot in SVG (`ladder_svg`)."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from flatout.records.ablation import Ablation, Comparison, Verdict
from flatout.records.messages import ENGLISH, Messages, interval_of, messages
from flatout.records.profile import PeakBytes, Profile
from flatout.records.technique import Numerics
from flatout.records.units import (
    MAX_RATIO_END,
    format_bytes,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.tables import NOTHING
from flatout.reporting.templates import render
from flatout.reporting.tuning.staged import count, training_s
from flatout.reporting.tuning.verdict import headline, loss_of, verdict_of

Cells = dict[str, Any]
"""Cells of a row by the names of their fields."""
KEPT = (Verdict.KEPT, Verdict.TOGETHER)
"""Verdicts of the techniques that came in, alone or with others."""
NO_GAIN = (Verdict.NO_EFFECT, Verdict.WORSE)
"""Verdicts of the techniques that were left out of the final recipe again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRow:
    """One row of the table in words, with the numbers that a plot needs."""

    kind: str
    """`baseline`, `technique` or `final`."""
    technique: str
    settings: str = ""
    together_with: tuple[str, ...] = ()
    """Techniques that were on as well: the ratio is that of all of them."""
    promise: str = NOTHING
    predicted: str = NOTHING
    measured_ratio: str = NOTHING
    interval: str = NOTHING
    pairs: str = NOTHING
    samples_per_s: str = NOTHING
    device_busy: str = NOTHING
    peak_memory: str = NOTHING
    loss_check: str = NOTHING
    verdict: str
    is_kept: bool = False
    times_baseline: float | None = None
    """Speed as a multiple of the baseline's; for a technique the recipe so far times its ratio.
    None
    where no interval tells how far to trust it."""
    whisker: tuple[float, float] | None = None
    """The interval of `times_baseline`, the techniques below it taken as exact."""


def ladder_rows(ablation: Ablation, say: Messages | None = None) -> tuple[LadderRow, ...]:
    """Return baseline, techniques in the order they were tried, and the whole recipe."""
    say = say or messages(ENGLISH)
    return (
        _baseline(ablation, say),
        *_techniques(ablation, say),
        *([_final(ablation, say)] if ablation.confirmation else []),
    )


def _baseline(ablation: Ablation, say: Messages) -> LadderRow:
    needed = ", ".join(ablation.needed)
    why = "so_that_it_runs" if needed else "as_it_is"
    row = LadderRow(
        kind="baseline",
        technique=say("tuning.baseline"),
        settings=say("tuning.with", techniques=needed) if needed else "",
        measured_ratio=format_ratio(1.0),
        loss_check=say.text(loss_of(ablation.aa_check)),
        verdict=say("verdict.spread" if ablation.is_spread else f"verdict.{why}"),
        is_kept=True,
        times_baseline=1.0,
    )
    return _with_readings(row, ablation.baseline)


def _techniques(ablation: Ablation, say: Messages) -> Iterator[LadderRow]:
    so_far, dropped = 1.0, _left_out_again(ablation)
    for row in ablation.rows:
        if row.stage != "add":
            continue
        pair = row.comparison
        came_in = row.verdict in KEPT
        is_left_out = came_in and row.choice.technique in dropped
        yield LadderRow(
            kind="technique",
            technique=row.choice.technique,
            settings=row.choice.label.removeprefix(row.choice.technique).strip(),
            together_with=row.together_with,
            promise=row.numerics,
            predicted=format_ratio(row.predicted_ratio) if row.predicted_ratio else NOTHING,
            **_pair_cells(pair, say),
            **_reading_cells(row.samples_per_s, row.device_busy_share, row.peak_bytes),
            loss_check=say.text(loss_of(row.loss_check)),
            verdict=say("verdict.left_out") if is_left_out else say.text(verdict_of(row)),
            is_kept=came_in and not is_left_out,
            times_baseline=(
                so_far * pair.ratio if pair and pair.interval[1] <= MAX_RATIO_END else None
            ),
            whisker=_scaled(pair.interval, so_far) if pair else None,
        )
        if row.verdict is Verdict.KEPT and pair:
            so_far *= pair.ratio


def _left_out_again(ablation: Ablation) -> set[str]:
    """Return what was kept once and is not in the final recipe, where it no longer paid."""
    drops = [row for row in ablation.rows if row.stage == "drop" and row.verdict in NO_GAIN]
    return {row.choice.technique for row in drops} - {*ablation.recipe.names}


def _final(ablation: Ablation, say: Messages) -> LadderRow:
    pair = ablation.confirmation
    assert pair is not None
    row = LadderRow(
        kind="final",
        technique=say("tuning.final"),
        settings=" + ".join(ablation.recipe.names),
        promise=_promise(ablation),
        **_pair_cells(pair, say),
        loss_check=say.text(loss_of(ablation.final_check)),
        verdict=say("verdict.confirmed" if _is_confirmed(ablation) else "verdict.not_confirmed"),
        is_kept=_is_confirmed(ablation),
        times_baseline=pair.ratio,
        whisker=_scaled(pair.interval, 1.0),
    )
    return _with_readings(row, ablation.final) if ablation.final else row


def _promise(ablation: Ablation) -> str:
    """Return the mildest promise that covers every technique of the recipe.

    A technique may have come in with others, and one that was kept may have been left out again.
    Of a recipe that was given up, nothing is left but what was kept on the way.
    """
    added = [row for row in ablation.rows if row.stage in {"add", "spread"}]
    names = {row.choice.technique for row in added if row.verdict in KEPT}
    if _is_confirmed(ablation):
        names = set(ablation.recipe.names)
    ranks = [Numerics(row.numerics).rank for row in added if row.choice.technique in names]
    return list(Numerics)[max(ranks)].value if ranks else NOTHING


def _is_confirmed(ablation: Ablation) -> bool:
    """Return whether the recipe held: one that did not is cut to what the script needs to run."""
    return len(ablation.recipe.choices) > len(ablation.needed)


def _scaled(interval: tuple[float, float], factor: float) -> tuple[float, float] | None:
    low, high = interval
    return (low * factor, high * factor) if high <= MAX_RATIO_END else None


def _with_readings(row: LadderRow, profile: Profile) -> LadderRow:
    cells = _reading_cells(profile.samples_per_s, profile.device_busy_share, profile.peak_bytes)
    return replace(row, **cells)


def _pair_cells(pair: Comparison | None, say: Messages) -> Cells:
    if pair is None:
        return {}
    count = say("gain.blocks", n=str(pair.n)) if pair.source == "screen" else str(pair.n)
    if pair.blocks:
        count = say("gain.both", n=str(pair.n), blocks=str(pair.blocks))
    return {
        "measured_ratio": format_ratio(pair.ratio),
        "interval": interval_of(pair.interval),
        "pairs": count,
    }


def _reading_cells(per_s: float | None, busy: float | None, peak: PeakBytes) -> Cells:
    """Return the readings; the peak is what the device's tensors took, else the process."""
    held = peak.allocated or peak.device
    return {
        "samples_per_s": format_rate(per_s) if per_s else NOTHING,
        "device_busy": NOTHING if busy is None else format_share(busy),
        "peak_memory": format_bytes(held) if held else NOTHING,
    }


WIDTH = 400
"""About a phone's width, so that nothing is scaled down there; each label is above its bar."""
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
    """What is at the right: the multiple and the verdict."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """One line of the scale."""

    x: float
    label: str
    is_baseline: bool


def ladder_svg(ablation: Ablation, language: str = ENGLISH) -> str:
    """Return the plot as one SVG file: it needs no script, no font and no network.

    It has one bar a technique, as a multiple of the baseline's speed.
    """
    say = messages(language)
    rows = [row for row in ladder_rows(ablation, say) if row.times_baseline is not None]
    return _plot("ladder", rows, say.text(headline(ablation)), say("tuning.chart_scale"), say)


def staged_svg(ablation: Ablation, language: str = ENGLISH) -> str | None:
    """Return the recipe as it grows as one SVG file; None where no recipe was proven."""
    say = messages(language)
    rows = list(_stages(ablation, say))
    if len(rows) < 2:
        return None
    return _plot("stages", rows, say.text(headline(ablation)), say("staged.chart_scale"), say)


def _stages(ablation: Ablation, say: Messages) -> Iterator[LadderRow]:
    """Yield a row a stage with speed, utilisation and minutes, as in the staged table."""
    first_per_s = ablation.stages[0].samples_per_s if ablation.stages else None
    for number, stage in enumerate(ablation.stages):
        if not first_per_s or not stage.samples_per_s:
            continue
        notes = []
        if stage.utilisation is not None:
            notes.append(say("staged.chart_busy", share=format_share(stage.utilisation)))
        seconds = training_s(ablation, stage)
        if ablation.training and seconds:
            notes.append(say("staged.chart_minutes", minutes=count(seconds / 60)))
        yield LadderRow(
            kind="technique" if number else "baseline",
            technique=stage.technique.split()[0] if number else say("tuning.baseline"),
            verdict=", ".join(notes),
            is_kept=True,
            times_baseline=stage.samples_per_s / first_per_s,
        )


def _plot(name: str, rows: list[LadderRow], title: str, caption: str, say: Messages) -> str:
    """Return rows as bars; `name` sets the plot's ids apart from those of another on its page."""
    top = _top(rows)
    names = Counter(row.technique for row in rows)
    bars = [
        _bar(row, _label(row, is_alone=names[row.technique] == 1), TOP + number * ROW_HEIGHT, top)
        for number, row in enumerate(rows)
    ]
    return render(
        "ladder.svg.j2",
        {
            "name": name,
            "bars": bars,
            "ticks": _ticks(top),
            "width": WIDTH,
            "height": TOP + ROW_HEIGHT * len(rows) + MARGIN,
            "left": MARGIN,
            "top": TOP,
            "bar_height": BAR_HEIGHT,
            "title": title,
            "caption": caption,
            "description": say(
                "tuning.chart", bars="; ".join(_read_aloud(row, say) for row in rows)
            ),
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
        note=", ".join(filter(None, (f"{row.times_baseline:.2f}x", row.verdict))),
    )


def _whisker(interval: tuple[float, float], y: float, top: float) -> str:
    low, high = interval
    line = f"M{_x(low, top)} {y + 24}v8m0-4H{_x(min(high, top), top)}"
    return f"{line}m0-4v8" if high <= top else line


def _label(row: LadderRow, *, is_alone: bool) -> str:
    """Return the technique's name, with its settings where it was tried with several."""
    text = row.technique if is_alone else f"{row.technique} {row.settings}".strip()
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


def _read_aloud(row: LadderRow, say: Messages) -> str:
    """Return a bar in words, for those who do not see it."""
    times = f"{row.times_baseline:.2f}"
    return say("tuning.chart_bar", technique=row.technique, times=times, verdict=row.verdict)
