"""The ranks of a multi-process training side by side: who is behind, and in what. Pure."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from flatout.analysis.profile import summarise, window_in
from flatout.records.machine import Machine
from flatout.records.messages import Text, named, words
from flatout.records.profile import PHASES, Profile
from flatout.records.readings import RankFacts
from flatout.records.trial_result import TrialResult
from flatout.records.units import format_ms

MIN_LAG = 0.05
"""Ranks on one machine differ by a few percent of a step without any cause; the steadiness of a
step is judged by the same five percent."""
MORE_SAMPLES = 1.1
"""A tenth more samples than the others is named as the cause: the batch is larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankView:
    """What one rank's own clock says."""

    rank: int
    profile: Profile
    communication_ms: Mapping[str, float] | None
    """Time in collectives by phase; None where the host cannot see it."""
    device: str = ""

    @property
    def own_ms(self) -> dict[str, float]:
        """The phases without communication; without the backward where it cannot be told apart.

        A rank that waits for another one does so in its backward.
        """
        phases = self.profile.phases_ms
        waits = self.communication_ms
        if waits is None:
            return {name: phases[name] for name in PHASES if name != "backward"}
        return {name: max(0.0, phases[name] - waits.get(name, 0.0)) for name in PHASES}


def leading(results: Sequence[TrialResult]) -> TrialResult | None:
    """Return the result that stands for the training: the lowest rank's, else the longest one."""
    ranked = ranked_in_order([result for result in results if result.segments])
    return next(iter([*ranked, *results]), None)


def ranked_in_order(results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the results of the processes that are ranks of one training, in order."""
    ranked = [(result.ranks.rank, result) for result in results if result.ranks is not None]
    return [result for _rank, result in sorted(ranked, key=lambda pair: pair[0])]


def add_ranks(profile: Profile, results: Sequence[TrialResult], machine: Machine) -> Profile:
    """Return the profile of the leading rank with all ranks; samples are those of all together."""
    ranked = ranked_in_order(results)
    if not ranked:
        return profile
    views = [
        RankView(
            rank=result.ranks.rank if result.ranks else 0,
            profile=summarise(result, machine),
            communication_ms=_communication_ms(result),
            device=result.device.uuid,
        )
        for result in ranked
        if window_in(result).measured
    ]
    size = ranked[0].ranks.world_size if ranked[0].ranks else 1
    missing = size - len(views)
    notes = [words("note.phases_of_rank", rank=str(views[0].rank), size=str(size))] if views else []
    if missing:
        notes.append(words("note.ranks_missing", missing=str(missing), size=str(size)))
    return replace(
        profile,
        samples_per_s=sum(view.profile.samples_per_s for view in views),
        samples_per_step=sum(view.profile.samples_per_step for view in views),
        ranks=compare_ranks(views),
        notes=(*profile.notes, *notes),
    )


def compare_ranks(views: Sequence[RankView]) -> tuple[RankFacts, ...]:
    """Return every rank's facts; the one that is behind is named with its cause.

    Behind is the rank whose own work takes longest, by at least `MIN_LAG` of a step beyond the
    median of the others. Step times themselves say nothing: ranks that step together take equally
    long, and those ahead wait in collectives.
    """
    lags = {view.rank: _lag(view, views) for view in views}
    last = max(views, key=lambda view: sum(lags[view.rank].values()), default=None)
    if last is not None and sum(lags[last.rank].values()) < MIN_LAG * last.profile.step_ms.median:
        last = None
    return tuple(
        RankFacts(
            rank=view.rank,
            step_ms=view.profile.step_ms.median,
            phases_ms=view.profile.phases_ms,
            samples_per_s=view.profile.samples_per_s,
            exposed_communication_ms=None
            if view.communication_ms is None
            else sum(view.communication_ms.values()),
            is_straggler=view is last,
            because=_because(view, views, lags[view.rank]) if view is last else "",
            first_batch=next((x.first_batch for x in view.profile.training_loaders), ""),
            device=view.device,
        )
        for view in views
    )


def _lag(view: RankView, views: Sequence[RankView]) -> dict[str, float]:
    """Return by phase what a rank's own work takes beyond the median of the others."""
    others = [other.own_ms for other in views if other is not view]
    if not others:
        return {}
    return {
        name: own - statistics.median(other[name] for other in others)
        for name, own in view.own_ms.items()
        if all(name in other for other in others)
    }


def _because(view: RankView, views: Sequence[RankView], lag: Mapping[str, float]) -> str:
    """Return the phase in which the rank is behind, and a larger batch where there is one."""
    phase = max(lag, key=lambda name: lag[name])
    own = view.own_ms[phase]
    known: dict[str, Text] = {
        "phase": named("phase", phase),
        "own": format_ms(own),
        "others": format_ms(own - lag[phase]),
    }
    others = statistics.median(o.profile.samples_per_step for o in views if o is not view)
    own_samples = view.profile.samples_per_step
    if others and own_samples >= MORE_SAMPLES * others:
        known |= {"samples": f"{own_samples:g}", "other_samples": f"{others:g}"}
        return words("note.straggler_samples", **known)
    return words("note.straggler", **known)


def _communication_ms(result: TrialResult) -> dict[str, float] | None:
    """Return the median time in collectives by phase; None where the device waits instead."""
    if result.device.kind != "cpu":
        return None
    return window_in(result).medians_ms(lambda step: step.communication)
