"""From a comparison of two recipes to a row of the table."""

import math
from dataclasses import replace

from flatout.core.ablation import LossCheck, Row, Verdict
from flatout.core.profile import PeakBytes
from flatout.core.recipe import Recipe
from flatout.core.stats import Decision
from flatout.core.trial import Outcome, Trial
from flatout.core.units import format_bytes, format_interval, format_ratio
from flatout.workflow.pairs import Match, pace_ms
from flatout.workflow.ranking import Candidate

MIN_STARTUP_S = 1.0
"""A longer start-up than the base's by less than this is noise, not compilation."""


def row_of(candidate: Candidate, base: Recipe, match: Match, check: LossCheck) -> Row:
    """Return the row of one candidate tried on top of `base`."""
    verdict, why = verdict_of(match, check)
    shown = match.candidate
    startup_s, break_even = _break_even(match)
    row = Row(
        choice=candidate.choice,
        numerics=candidate.numerics.value,
        verdict=verdict,
        on_top_of=tuple(name for name in base.names if name != candidate.choice.technique),
        comparison=match.comparison,
        loss_check=check,
        predicted_ratio=candidate.ratio,
        bound_ratio=candidate.bound.ratio if math.isfinite(candidate.bound.ratio) else None,
        startup_s=startup_s,
        break_even_steps=break_even,
        why=why,
    )
    if shown is None:
        return row
    if candidate.effect.peak_bytes < 0 and match.base is not None and not why:
        row = replace(row, why=_memory_line(match.base.peak_bytes, shown.peak_bytes))
    return replace(
        row,
        samples_per_s=shown.samples_per_s,
        device_busy_share=shown.device_busy_share,
        peak_bytes=shown.peak_bytes,
    )


def verdict_of(match: Match, check: LossCheck) -> tuple[Verdict, str]:
    """Return what is said about a lever, and why where that is not plain."""
    if match.failure is not None:
        return _failed(match.failure)
    if match.decision is Decision.KEPT:
        return (Verdict.KEPT, "") if check.passed else (Verdict.REJECTED, check.why)
    if match.decision is Decision.WORSE:
        return Verdict.WORSE, ""
    if match.decision is Decision.NO_EFFECT:
        return Verdict.NO_EFFECT, ""
    return Verdict.INCONCLUSIVE, "the budget ran out" if match.ran_out else ""


def _memory_line(before: PeakBytes, after: PeakBytes) -> str:
    """Say what a lever that saves memory did to the peak."""
    was, now = (peak.allocated or peak.device for peak in (before, after))
    return f"peak memory {format_bytes(now)} instead of {format_bytes(was)}"


def _failed(trial: Trial) -> tuple[Verdict, str]:
    """Return the verdict on a trial that gave no measurement of its recipe, and one line."""
    if trial.outcome not in (Outcome.OK, Outcome.REFUSED):
        return Verdict.FAILED, f"{trial.outcome.value}: {trial.message}"
    broken = [item for item in trial.not_applied if item.status == "failed"]
    missed = (broken or trial.not_applied)[0]
    newest = trial.recipe.names[-1]
    # The row carries the newest lever's name; another one has to be named.
    who = "" if missed.technique == newest else f"{missed.technique}: "
    lines = missed.why.strip().splitlines() or ["no reason given"]
    return Verdict.FAILED if broken else Verdict.NOT_APPLICABLE, f"{who}{lines[0]}"


def _break_even(match: Match) -> tuple[float, int | None]:
    """Return the extra start-up of the candidate and the steps that pay it back."""
    first, base, steady = match.first_candidate, match.base, match.candidate
    if first is None or base is None or steady is None:
        return 0.0, None
    startup_s = (first.warmup_ms - base.warmup_ms) / 1e3
    saved_s = (base.whole_step_ms - pace_ms(steady, base)) / 1e3
    if startup_s < MIN_STARTUP_S or saved_s <= 0:
        return max(0.0, startup_s), None
    return startup_s, int(startup_s / saved_s) + 1


def event_of(row: Row) -> str:
    """Return one line about a row for the running display."""
    pair = row.comparison
    shown = f" {format_ratio(pair.ratio)} ({format_interval(*pair.interval)})" if pair else ""
    why = f" ({row.why})" if row.why else ""
    return f"{row.choice.label}: {row.verdict.value.replace('_', ' ')}{shown}{why}"
