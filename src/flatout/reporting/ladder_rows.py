"""The rows of the ladder, as cells: baseline first, the whole recipe last."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from flatout.core.ablation import Ablation, Comparison, Verdict
from flatout.core.profile import Profile
from flatout.core.technique import Numerics
from flatout.core.units import MAX_RATIO_END, format_rate, format_ratio
from flatout.reporting.words import (
    NOTHING,
    busy_words,
    interval_words,
    loss_words,
    memory_words,
    pairs_words,
    ratio_words,
    settings_words,
    verdict_words,
)

KEPT = (Verdict.KEPT, Verdict.TOGETHER)
"""Verdicts of the levers that came in, alone or with others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LadderRow:
    """One row of the table in words, with the numbers that a plot needs."""

    kind: str
    """`baseline`, `lever` or `final`."""
    lever: str
    settings: str = ""
    promise: str = NOTHING
    predicted: str = NOTHING
    ratio: str = NOTHING
    interval: str = NOTHING
    n: str = NOTHING
    samples_per_s: str = NOTHING
    busy: str = NOTHING
    memory: str = NOTHING
    loss_check: str = NOTHING
    verdict: str
    is_kept: bool = False
    times_baseline: float | None = None
    """Speed as a multiple of the baseline's; for a lever the recipe so far times its ratio. None
    where no interval tells how far to trust it."""
    whisker: tuple[float, float] | None = None
    """The interval of `times_baseline`, the levers below it taken as exact."""


def ladder_rows(ablation: Ablation) -> tuple[LadderRow, ...]:
    """Return baseline, levers in the order they were tried, and the whole recipe."""
    return (
        _baseline(ablation),
        *_levers(ablation),
        *([_final(ablation)] if ablation.confirmation else []),
    )


def _baseline(ablation: Ablation) -> LadderRow:
    row = LadderRow(
        kind="baseline",
        lever="baseline",
        settings=f"with {', '.join(ablation.needed)}" if ablation.needed else "",
        ratio=format_ratio(1.0),
        loss_check=loss_words(ablation.aa_check),
        verdict="so that it runs" if ablation.needed else "as it is",
        is_kept=True,
        times_baseline=1.0,
    )
    return _with_readings(row, ablation.baseline)


def _levers(ablation: Ablation) -> Iterator[LadderRow]:
    so_far = 1.0
    for row in ablation.rows:
        if row.stage != "add":
            continue
        pair = row.comparison
        yield LadderRow(
            kind="lever",
            lever=row.choice.technique,
            settings=settings_words(row),
            promise=row.numerics,
            predicted=format_ratio(row.predicted_ratio) if row.predicted_ratio else NOTHING,
            ratio=ratio_words(pair),
            interval=interval_words(pair),
            n=pairs_words(pair),
            samples_per_s=_rate_words(row.samples_per_s),
            busy=busy_words(row.device_busy_share),
            memory=memory_words(row.peak_bytes),
            loss_check=loss_words(row.loss_check),
            verdict=verdict_words(row),
            is_kept=row.verdict in KEPT,
            times_baseline=so_far * pair.ratio if pair and _has_end(pair) else None,
            whisker=_scaled(pair.interval, so_far) if pair else None,
        )
        if row.verdict is Verdict.KEPT and pair:
            so_far *= pair.ratio


def _final(ablation: Ablation) -> LadderRow:
    pair = ablation.confirmation
    assert pair is not None
    row = LadderRow(
        kind="final",
        lever="whole recipe",
        settings=" + ".join(ablation.recipe.names),
        promise=_promise(ablation),
        ratio=ratio_words(pair),
        interval=interval_words(pair),
        n=pairs_words(pair),
        loss_check=loss_words(ablation.final_check),
        verdict="confirmed" if _is_confirmed(ablation) else "not confirmed",
        is_kept=_is_confirmed(ablation),
        times_baseline=pair.ratio,
        whisker=_scaled(pair.interval, 1.0),
    )
    return _with_readings(row, ablation.final) if ablation.final else row


def _promise(ablation: Ablation) -> str:
    """Return the mildest promise that covers every lever of the recipe, whatever its own verdict.

    A lever may have come in with others, and one that was kept may have been left out again. Of a
    recipe that was given up, nothing is left but what was kept on the way.
    """
    added = [row for row in ablation.rows if row.stage == "add"]
    names = {row.choice.technique for row in added if row.verdict in KEPT}
    if _is_confirmed(ablation):
        names = set(ablation.recipe.names)
    ranks = [Numerics(row.numerics).rank for row in added if row.choice.technique in names]
    return list(Numerics)[max(ranks)].value if ranks else NOTHING


def _is_confirmed(ablation: Ablation) -> bool:
    """Tell whether the recipe held: one that did not is cut to what the script needs to run."""
    return len(ablation.recipe.choices) > len(ablation.needed)


def _scaled(interval: tuple[float, float], factor: float) -> tuple[float, float] | None:
    low, high = interval
    return (low * factor, high * factor) if high <= MAX_RATIO_END else None


def _has_end(pair: Comparison) -> bool:
    return pair.interval[1] <= MAX_RATIO_END


def _with_readings(row: LadderRow, profile: Profile) -> LadderRow:
    return replace(
        row,
        samples_per_s=_rate_words(profile.samples_per_s),
        busy=busy_words(profile.device_busy_share),
        memory=memory_words(profile.peak_bytes),
    )


def _rate_words(per_s: float | None) -> str:
    return format_rate(per_s) if per_s else NOTHING
