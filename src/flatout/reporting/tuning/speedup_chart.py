"""The ladder of a tuning as table cells (`ladder_rows`) and as a plot in SVG (`ladder_svg`)."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from flatout.records.ablation import Ablation, Comparison, Row, Verdict
from flatout.records.messages import ENGLISH, Messages, interval_of, messages
from flatout.records.profile import Profile
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

KEPT = (Verdict.KEPT, Verdict.TOGETHER)
"""Verdicts of the techniques that came in, alone or with others."""
NO_GAIN = (Verdict.NO_EFFECT, Verdict.WORSE)
"""Verdicts of the techniques that were left out of the final recipe again."""
WIDTH = 400
"""About a phone's width, so that nothing is scaled down there; each label is above its bar."""
MARGIN = 8
ROW_HEIGHT = 48
TOP = 54
"""Room for the caption and the scale."""
MAX_LABEL = 36
"""Characters that leave room for the note at the right."""
MAX_TICKS = 6
ROOM_FOR_WHISKERS = 1.3
"""A whisker that reaches further than this beyond the longest bar is cut, without an end mark."""


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
    None where no interval tells how far to trust it."""
    whisker: tuple[float, float] | None = None
    """The interval of `times_baseline`, the techniques below it taken as exact."""


def ladder_rows(ablation: Ablation, say: Messages | None = None) -> tuple[LadderRow, ...]:
    """Return baseline, techniques in the order they were tried, and the whole recipe."""
    say = say or messages(ENGLISH)
    return (
        _baseline(ablation, say),
        *_techniques(ablation, say),
        *([_final(ablation, pair, say)] if (pair := ablation.confirmation) else []),
    )


def _baseline(ablation: Ablation, say: Messages) -> LadderRow:
    needed = ", ".join(ablation.needed)
    why = "so_that_it_runs" if needed else "as_it_is"
    return LadderRow(
        kind="baseline",
        technique=say("tuning.baseline"),
        settings=say("tuning.with", techniques=needed) if needed else "",
        measured_ratio=format_ratio(1.0),
        loss_check=say.text(loss_of(ablation.aa_check)),
        verdict=say("verdict.spread" if ablation.is_spread else f"verdict.{why}"),
        is_kept=True,
        times_baseline=1.0,
        **_reading_cells(ablation.baseline),
    )


def _techniques(ablation: Ablation, say: Messages) -> Iterator[LadderRow]:
    so_far = 1.0
    # What was kept once and is not in the final recipe, where it no longer paid.
    drops = [row for row in ablation.rows if row.stage == "drop" and row.verdict in NO_GAIN]
    dropped = {row.choice.technique for row in drops} - {*ablation.recipe.names}
    for row in ablation.rows:
        if row.stage != "add":
            continue
        pair = row.comparison
        came_in = row.verdict in KEPT
        # A screen tries what it does not keep on top of all that it does, in whatever order.
        on_top_of = so_far
        if row.verdict is not Verdict.KEPT:
            on_top_of = math.prod(
                kept.comparison.ratio
                for kept in ablation.kept
                if kept.comparison and kept.choice.technique in row.on_top_of
            )
        is_left_out = came_in and row.choice.technique in dropped
        yield LadderRow(
            kind="technique",
            technique=row.choice.technique,
            settings=row.choice.label.removeprefix(row.choice.technique).strip(),
            together_with=row.together_with,
            promise=row.numerics,
            predicted=format_ratio(row.predicted_ratio) if row.predicted_ratio else NOTHING,
            **_pair_cells(pair, say),
            **_reading_cells(row),
            loss_check=say.text(loss_of(row.loss_check)),
            verdict=say("verdict.left_out") if is_left_out else say.text(verdict_of(row)),
            is_kept=came_in and not is_left_out,
            times_baseline=(
                on_top_of * pair.ratio if pair and pair.interval[1] <= MAX_RATIO_END else None
            ),
            whisker=_scaled(pair.interval, on_top_of) if pair else None,
        )
        if row.verdict is Verdict.KEPT and pair:
            so_far *= pair.ratio


def _final(ablation: Ablation, pair: Comparison, say: Messages) -> LadderRow:
    return LadderRow(
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
        **(_reading_cells(ablation.final) if ablation.final else {}),
    )


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


def _pair_cells(pair: Comparison | None, say: Messages) -> dict[str, Any]:
    if pair is None:
        return {}
    pairs = say("gain.blocks", n=pair.n) if pair.source == "screen" else str(pair.n)
    if pair.blocks:
        pairs = say("gain.both", n=pair.n, blocks=pair.blocks)
    return {
        "measured_ratio": format_ratio(pair.ratio),
        "interval": interval_of(pair.interval),
        "pairs": pairs,
    }


def _reading_cells(seen: Profile | Row) -> dict[str, Any]:
    """Return the readings; the peak is what the device's tensors took, else the process."""
    per_s, busy = seen.samples_per_s, seen.device_busy_share
    held = seen.peak_bytes.allocated or seen.peak_bytes.device
    return {
        "samples_per_s": format_rate(per_s) if per_s else NOTHING,
        "device_busy": NOTHING if busy is None else format_share(busy),
        "peak_memory": format_bytes(held) if held else NOTHING,
    }


def ladder_svg(ablation: Ablation, language: str = ENGLISH) -> str:
    """Return the plot as one SVG file, a bar a technique: no script, no font, no network."""
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
    names = Counter(row.technique for row in rows)
    speeds = [row.times_baseline or 0.0 for row in rows]
    # The scale ends with the longest whisker, unless that would squash the bars.
    longest = max(1.0, *speeds)
    reach = max((row.whisker[1] for row in rows if row.whisker), default=0.0)
    top = max(longest, min(reach, ROOM_FOR_WHISKERS * longest))
    bars, aloud = [], []
    for number, (row, speed) in enumerate(zip(rows, speeds, strict=True)):
        about = {"technique": row.technique, "times": f"{speed:.2f}", "verdict": row.verdict}
        aloud.append(say("tuning.chart_bar", **about))
        y = TOP + number * ROW_HEIGHT
        label = row.technique
        if names[label] > 1:  # it was tried with several settings
            label = f"{label} {row.settings}".strip()
        bars.append(
            {
                "row": row,
                "label": label if len(label) <= MAX_LABEL else label[: MAX_LABEL - 3] + "...",
                "y": y,
                "length": _x(speed, top) - MARGIN,
                "whisker": _whisker(row.whisker, y, top) if row.whisker else "",
                "note": ", ".join(filter(None, (f"{speed:.2f}x", row.verdict))),
            }
        )
    values = {
        "name": name,
        "bars": bars,
        "ticks": [(_x(value, top), f"{value:g}x") for value in _ticks(top)],
        "width": WIDTH,
        "height": TOP + ROW_HEIGHT * len(rows) + MARGIN,
        "left": MARGIN,
        "top": TOP,
        "title": title,
        "caption": caption,
        "description": say("tuning.chart", bars="; ".join(aloud)),
    }
    return render("ladder.svg.j2", values)


def _whisker(interval: tuple[float, float], y: float, top: float) -> str:
    """Return the path of an interval."""
    low, high = interval
    line = f"M{_x(low, top)} {y + 24}v8m0-4H{_x(min(high, top), top)}"
    return f"{line}m0-4v8" if high <= top else line


def _x(times: float, top: float) -> float:
    return round(MARGIN + (WIDTH - 2 * MARGIN) * times / top, 1)


def _ticks(top: float) -> list[float]:
    """Return round steps from 0 to the end of the scale, with the baseline always among them.

    >>> _ticks(2.2), _ticks(15.0)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 5.0, 10.0, 15.0, 1.0])
    """
    least = top / MAX_TICKS
    power = 10.0 ** math.floor(math.log10(least) + 1e-9)
    step = next(power * m for m in (1.0, 2.0, 5.0, 10.0) if power * m >= least - 1e-9)
    values = [step * i for i in range(math.floor(top / step + 1e-9) + 1)]
    return values if any(math.isclose(value, 1.0) for value in values) else [*values, 1.0]
