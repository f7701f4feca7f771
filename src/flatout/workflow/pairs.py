"""Compare two recipes by interleaved pairs of fresh processes until the rule can decide."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from flatout.core.ablation import Comparison
from flatout.core.profile import Profile
from flatout.core.recipe import Recipe
from flatout.core.stats import (
    Decision,
    Evidence,
    Rule,
    can_decide,
    compare,
    decide,
    gather,
    prior_of,
)
from flatout.core.trial import Outcome, Trial
from flatout.workflow.lab import Lab

SAME_BATCH = 0.1
"""Samples a step that differ by less are the same: an epoch's last batch is short."""


@dataclass(slots=True)
class Sides:
    """The profiles of the trials so far, pair by pair."""

    base: list[Profile] = field(default_factory=list)
    candidate: list[Profile] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The outcome of comparing two recipes."""

    decision: Decision
    comparison: Comparison | None
    base: Profile | None
    """Profile of the base's middle trial."""
    candidate: Profile | None
    first_candidate: Profile | None = None
    """Profile of the candidate's first trial: it compiles what no earlier tuning compiled."""
    failure: Trial | None = None
    """The candidate's trial that did not work, if any."""
    sides: Sides = field(default_factory=Sides)
    """To go on from, should more pairs be wanted."""
    ran_out: bool = False
    """Whether the budget ended the comparison."""


def play(
    lab: Lab,
    base: Recipe,
    candidate: Recipe,
    *,
    may_go_on: Callable[[], bool],
    rule: Rule = Rule(),
    earlier: Match | None = None,
) -> Match:
    """Run pairs AB, BA, AB, ... until the rule decides, pairs run out, or time does.

    Where the last trial before was one of the base, for another candidate, it serves the first pair
    too. Each comparison by itself is as it was, and a candidate costs three trials, not four.
    A candidate that shows no gain worth waiting for after `rule.patience` pairs is set aside: the
    time is better spent on the next one. That can only turn an answer into "inconclusive".
    """
    sides = earlier.sides if earlier else Sides()
    evidence = _evidence(lab, sides, rule) if sides.base else None
    decision, ran_out = Decision.UNDECIDED, False
    for number in range(len(sides.base), rule.max_pairs):
        if rule.looks_ahead and evidence is not None and not can_decide(evidence, rule):
            break
        if number >= max(1, rule.at_least) and not may_go_on():
            ran_out = True
            break
        failure = _play_pair(lab, base, candidate, sides, starts_with_base=number % 2 == 0)
        if failure is not None:
            return Match(
                decision=Decision.UNDECIDED,
                comparison=None,
                base=_middle(sides.base),
                candidate=None,
                failure=failure,
            )
        evidence = _evidence(lab, sides, rule)
        decision = decide(evidence, rule)
        if decision is not Decision.UNDECIDED and number + 1 >= rule.at_least:
            break
        if number + 1 >= rule.patience and evidence.mean < math.log(rule.promising):
            break
    return Match(
        decision=decision,
        comparison=compare(evidence, rule) if evidence else None,
        base=_middle(sides.base),
        candidate=_middle(sides.candidate),
        first_candidate=sides.candidate[0] if sides.candidate else None,
        sides=sides,
        ran_out=ran_out,
    )


def _play_pair(
    lab: Lab, base: Recipe, candidate: Recipe, sides: Sides, *, starts_with_base: bool
) -> Trial | None:
    """Run one pair; return the trial that failed, if one did."""
    order = [(base, sides.base), (candidate, sides.candidate)]
    for recipe, side in order if starts_with_base else order[::-1]:
        if recipe is candidate:
            trial = lab.time(recipe, must_apply=True)
        else:
            trial = lab.time(recipe) if sides.base else lab.again(recipe)
        if trial.outcome is not Outcome.OK or trial.profile is None:
            return trial
        if recipe is candidate and trial.not_applied:
            return trial
        side.append(trial.profile)
        lab.latest = trial if recipe is base else None
    return None


def _evidence(lab: Lab, sides: Sides, rule: Rule) -> Evidence:
    base_s = [profile.whole_step_ms / 1e3 for profile in sides.base]
    candidate_s = [
        pace_ms(profile, base) / 1e3
        for profile, base in zip(sides.candidate, sides.base, strict=True)
    ]
    own = {*base_s, *(profile.whole_step_ms / 1e3 for profile in sides.candidate)}
    others = [[t for t in group if t not in own] for group in lab.all_times()]
    return gather(base_s, candidate_s, prior_of([g for g in others if g], rule), rule)


def pace_ms(profile: Profile, base: Profile) -> float:
    """Return the time in which a recipe trains the samples of one step of its base.

    That is its own step, unless it changes the batch: a step of twice the samples may take twice as
    long. Where the samples are not known the steps are taken to hold equally many.
    """
    own, theirs = profile.samples_per_step, base.samples_per_step
    if not own or not theirs or abs(own / theirs - 1) < SAME_BATCH:
        return profile.whole_step_ms
    return profile.whole_step_ms * theirs / own


def _middle(profiles: list[Profile]) -> Profile | None:
    if not profiles:
        return None
    return sorted(profiles, key=lambda profile: profile.whole_step_ms)[len(profiles) // 2]
