"""Which lever to try next: candidates for this profile on this machine, by predicted gain."""

from collections.abc import Collection
from dataclasses import dataclass

from flatout import techniques
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.recipe import Choice
from flatout.core.regime import Bound
from flatout.core.technique import Effect, Numerics, Technique
from flatout.profiling.regime import best_case, is_hopeless

WORTH_A_TRIAL = 1.02
"""A predicted gain below this cannot pass the rule, so it is not tried."""
MAX_RATIO = 20.0
"""Predictions are capped: a step that is predicted to take no time at all is a wrong model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One lever with settings, and what it is predicted to bring on top of the recipe so far."""

    choice: Choice
    numerics: Numerics
    effect: Effect
    ratio: float
    bound: Bound
    """The most it could bring, whatever was predicted."""

    @property
    def is_worth_a_trial(self) -> bool:
        """Whether the predicted gain could be shown at all."""
        return self.ratio >= WORTH_A_TRIAL

    def find_reason_against(self, smallest: float) -> str | None:
        """Return why a trial is a waste, given the smallest gain that could show, or None."""
        if self.effect.peak_bytes < 0 and self.ratio <= 1:
            return None  # offered where memory is tight: what it saves is worth knowing
        if is_hopeless(self.bound, max(smallest, WORTH_A_TRIAL)):
            return self.bound.why
        return None if self.is_worth_a_trial else f"predicted {self.ratio:.2f}x at most"


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Which levers may be tried at all."""

    machine: Machine
    ceiling: Numerics
    only: Collection[str] = ()
    skip: Collection[str] = ()


def rank(profile: Profile, search: Search) -> list[Candidate]:
    """Return the candidates of every allowed technique, the largest predicted gain first."""
    found = [
        _candidate(name, option, profile, search.machine)
        for name in techniques.names()
        if name not in search.skip and (not search.only or name in search.only)
        for kind in [techniques.technique_class(name)]
        if search.ceiling.allows(kind.numerics)
        for option in kind.candidates(profile, search.machine)
    ]
    return sorted(found, key=lambda candidate: -candidate.ratio)


def find_companion(
    before: Profile, after: Profile, candidate: Candidate, search: Search
) -> Candidate | None:
    """Return the lever that a candidate by itself made worth trying, if there is one.

    Workers on a machine without a free core wait for the training's threads: only both levers
    together help, and one at a time neither would be kept.
    """
    known = {found.choice.label for found in rank(before, search)}
    for found in rank(after, search):
        is_new = found.choice.label not in known
        if is_new and found.choice.technique != candidate.choice.technique:
            return found if found.is_worth_a_trial else None
    return None


def _candidate(name: str, option: Technique, profile: Profile, machine: Machine) -> Candidate:
    effect = option.predict(profile, machine)
    bound = best_case(profile, option.addresses)
    step_ms = profile.whole_step_ms
    after_ms = max(step_ms + effect.step_ms, step_ms / MAX_RATIO)
    return Candidate(
        choice=Choice(technique=name, settings=option.settings()),
        numerics=option.numerics,
        effect=effect,
        ratio=min(step_ms / after_ms, bound.ratio),
        bound=bound,
    )
