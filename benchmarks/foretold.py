"""What techniques foretold of the unchanged script, alongside what they then did to it.

A sign is wrong where the technique was measured to do the opposite, beyond its interval, of what
its `predict` said. Of memory there is no interval: what is closer to 1 than two runs of one
script are to each other says nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.records import catalogue
from flatout.records.ablation import Comparison
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial
from flatout.records.units import format_ratio
from flatout.techniques.memory_pressure import peak_bytes
from flatout.tuning.extra_profiling import look_closer
from flatout.tuning.feeding import is_about_data, look
from flatout.tuning.ranking import Candidate, Search, candidate_of
from flatout.tuning.trial_runner import TrialRunner

NEUTRAL = 0.005
"""A prediction nearer to 1 than this says that nothing changes."""
SAME_MEMORY = 0.02
"""Peaks of techniques that do nothing to memory differed by as much: the record of 2026-11-22."""
RIGHT, WRONG, OPEN = "right", "wrong", "open"
HEADER = (
    *("script", "technique", "predicted", "at most", "measured", "sign"),
    *("peak predicted", "peak measured", "sign of the peak"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Foretold:
    """One technique's prediction and its outcome on one script."""

    script: str
    candidate: Candidate
    measured: Comparison
    peak_predicted: float | None
    """Ratio of the peaks with the technique and without; None where it promises nothing of memory.
    """
    peak_measured: float

    @property
    def sign(self) -> str:
        """Whether the step went where it was said to; `open` where the interval covers 1."""
        told = _side(self.candidate.ratio, NEUTRAL)
        if self.measured.covers_one:
            return OPEN if told else RIGHT
        return RIGHT if told == _side(self.measured.ratio, 0.0) else WRONG

    @property
    def peak_sign(self) -> str:
        """The same of the peak; empty where nothing was said."""
        if self.peak_predicted is None:
            return ""
        was = _side(self.peak_measured, SAME_MEMORY)
        if was == 0:
            return OPEN
        return RIGHT if was == _side(self.peak_predicted, 0.0) else WRONG


def foresee(
    lab: TrialRunner, profile: Profile, levers: Mapping[str, Mapping[str, Any]]
) -> dict[str, Candidate]:
    """Return what each technique predicts of the unchanged script, looked at as a tuning does."""
    search = Search(machine=lab.machine, ceiling=Numerics.TRAINING, only=tuple(levers))
    wall_s = lab.history.cost_s(Recipe(), 0.0)
    first = Trial(recipe=Recipe(), outcome=Outcome.OK, profile=profile, wall_s=wall_s)
    looks = lab.drive(look_closer(lab.history, search, Recipe(), first, math.inf))
    if is_about_data(search):
        looks = replace(looks, pipeline=lab.drive(look(lab.history, Recipe(), profile)).pipeline)
    seen = looks.added_to(profile, ())
    return {
        name: candidate_of(name, catalogue.technique_class(name)(**settings), seen, lab.machine)
        for name, settings in levers.items()
    }


def foretold(
    script: str, candidate: Candidate, base: Profile, measured: Comparison, peak_measured: float
) -> Foretold:
    """Return a prediction alongside its outcome."""
    saved, peak = candidate.effect.peak_bytes, peak_bytes(base)
    return Foretold(
        script=script,
        candidate=candidate,
        measured=measured,
        peak_predicted=max(0.0, 1 + saved / peak) if saved and peak else None,
        peak_measured=peak_measured,
    )


def table(found: Sequence[Foretold]) -> list[tuple[str, ...]]:
    """Return the calibration.

    Header and a row for each technique; nothing where none was measured.
    """
    return [HEADER, *map(_row, found)] if found else []


def summary(found: Sequence[Foretold]) -> list[str]:
    """Return how many signs were right, and one line for each that was wrong."""
    if not found:
        return []
    signs = [("step", [each.sign for each in found])]
    signs.append(("peak memory", [each.peak_sign for each in found if each.peak_sign]))
    lines = [
        f"Signs of the predicted {what}: {told.count(RIGHT)} right, {told.count(WRONG)} wrong, "
        f"{told.count(OPEN)} too close to tell."
        for what, told in signs
        if told
    ]
    for each in found:
        who = f"{each.script}, {each.candidate.choice.label}"
        why = each.candidate.effect.why
        if each.sign == WRONG:
            pair = (format_ratio(each.candidate.ratio), format_ratio(each.measured.ratio))
            lines.append(
                f"Wrong of the step: {who}: {pair[0]} was predicted ({why}), it is {pair[1]}."
            )
        if each.peak_sign == WRONG and each.peak_predicted is not None:
            pair = (format_ratio(each.peak_predicted), format_ratio(each.peak_measured))
            lines.append(
                f"Wrong of the peak: {who}: {pair[0]} was predicted ({why}), it is {pair[1]}."
            )
    return lines


def _row(each: Foretold) -> tuple[str, ...]:
    bound = each.candidate.bound.ratio
    told = each.peak_predicted
    return (
        *(each.script, each.candidate.choice.label, format_ratio(each.candidate.ratio)),
        format_ratio(bound) if math.isfinite(bound) else "",
        *(format_ratio(each.measured.ratio), each.sign),
        format_ratio(told) if told is not None else "",
        *(format_ratio(each.peak_measured), each.peak_sign),
    )


def _side(ratio: float, tolerance: float) -> int:
    """Return 1 above 1, -1 below, 0 within the tolerance."""
    if abs(ratio - 1) <= tolerance:
        return 0
    return 1 if ratio > 1 else -1
