"""Compare two recipes by interleaved pairs of fresh processes until the rule can decide.

`row_of` makes a row of the table of it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from flatout.records.ablation import Comparison, LossCheck, Row, Verdict
from flatout.records.messages import interval_of, named, times, words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.statistics import (
    Decision,
    Evidence,
    InProcess,
    Rule,
    can_decide,
    compare,
    decide,
    gather,
    prior_of,
)
from flatout.records.trial import Outcome, Trial
from flatout.records.units import format_bytes
from flatout.tuning.experiments import Asking, TrialHistory, disturbances, foreign_share_of, key_of
from flatout.tuning.ranking import Candidate
from flatout.tuning.turns import Turned, compare_turns, noise_of

BUSY = "row.busy"
"""What the message is called that other work kept a pair from being measured."""
SAME_BATCH = 0.1
"""Samples a step that differ by less are the same: an epoch's last batch is short."""


@dataclass(slots=True)
class Sides:
    """The profiles of the trials so far, pair by pair."""

    base: list[Profile] = field(default_factory=list)
    candidate: list[Profile] = field(default_factory=list)
    loaded: int = 0
    """Pairs under a load that the user accepted."""
    disturbed: list[str] = field(default_factory=list)
    """What spoilt the pairs that do not count: other work, or a base that did not run."""
    in_process: InProcess | None = None
    """What a screen showed of the two recipes."""
    turned: list[Turned] = field(default_factory=list)
    """Of the pairs whose processes took turns, what their turns say."""
    go_alone: bool = False
    """Whether the two do not take turns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """The outcome of comparing two recipes."""

    decision: Decision = Decision.UNDECIDED
    comparison: Comparison | None = None
    base: Profile | None = None
    """Profile of the base's middle trial."""
    candidate: Profile | None = None
    failure: Trial | None = None
    """The candidate's trial that did not work, if any."""
    sides: Sides = field(default_factory=Sides)
    """To go on from, should more pairs be wanted."""
    ran_out: bool = False
    """Whether the budget ended the comparison."""
    disturbed: str = ""
    """What kept a pair from being measured, where that ended the comparison."""

    def is_cut_short(self, rule: Rule) -> bool:
        """Return whether the budget ended the pairs of what looks like a gain so far."""
        is_open = self.ran_out and self.decision is Decision.UNDECIDED
        return is_open and self.comparison is not None and self.comparison.ratio >= rule.promising


def play(
    history: TrialHistory,
    base: Recipe,
    candidate: Recipe,
    *,
    may_go_on: Callable[[int], bool],
    rule: Rule = Rule(),
    sides: Sides | None = None,
) -> Asking[Match]:
    """Ask for pairs AB, BA, AB, ... until the rule decides, pairs run out, or time does.

    `may_go_on` is asked with the number of pairs so far. `sides` are those that were played before,
    to go on from, and what a screen showed of the two recipes: that counts next to the pairs, as
    long as these do not contradict it.
    Where the last trial before was one of the base, for another candidate, it serves the first pair
    too. Each comparison on its own is as it was, and a candidate costs three trials, not four.
    A candidate that shows no gain worth waiting for after `rule.patience` pairs is set aside: the
    time is better spent on the next one. That can only turn an answer into "inconclusive".
    """
    sides = sides or Sides()
    evidence = _evidence(history, sides, rule) if sides.base else None
    decision, ran_out = _decision(evidence, sides, rule), False
    while (number := len(sides.base)) < rule.max_pairs:
        if decision is not Decision.UNDECIDED and number >= rule.at_least:
            break
        if evidence is not None:
            is_promising = evidence.estimate[0] >= math.log(rule.promising)
            if number >= rule.patience and not is_promising and not _is_too_loaded(sides):
                break
            if rule.looks_ahead and not can_decide(evidence, rule):
                break
        if number >= max(1, rule.at_least) and not may_go_on(number):
            ran_out = True
            break
        failure = yield from _next_pair(history, base, candidate, sides)
        if failure is not None:
            return Match(base=_middle(sides.base), failure=failure)
        if len(sides.base) == number:  # the pair does not count
            if len(sides.disturbed) >= MOST_DISTURBED:
                break
            continue
        evidence = _evidence(history, sides, rule)
        decision = _decision(evidence, sides, rule)
    return Match(
        decision=decision,
        comparison=compare(evidence, rule) if evidence else None,
        base=_middle(sides.base),
        candidate=_middle(sides.candidate),
        sides=sides,
        ran_out=ran_out,
        disturbed=sides.disturbed[-1] if len(sides.disturbed) >= MOST_DISTURBED else "",
    )


def _decision(evidence: Evidence | None, sides: Sides, rule: Rule) -> Decision:
    if evidence is None or _is_too_loaded(sides):
        return Decision.UNDECIDED
    return decide(evidence, rule)


def _is_too_loaded(sides: Sides) -> bool:
    """Return whether it is too early to say anything, under a load that the user accepted."""
    return bool(sides.loaded) and len(sides.base) < LOADED_PAIRS


def _next_pair(
    history: TrialHistory, base: Recipe, candidate: Recipe, sides: Sides
) -> Asking[Trial | None]:
    """Count the next pair where another host has played it; else play it here.

    Other hosts begin on as many pairs as any rule may want: the two recipes may be compared again.
    """
    number = len(sides.base)
    is_even = number % 2 == 0
    if not sides.go_alone:
        pair = yield from history.in_turns(base, candidate, starts_with_base=is_even)
        if pair:
            return _counted(history, pair, sides)
        sides.go_alone = True
    pair = yield from history.played_elsewhere(
        base, candidate, starts_with_base=is_even, most=Rule().max_pairs - number - 1
    )
    if not pair:
        return (yield from play_pair(history, base, candidate, sides, starts_with_base=is_even))
    for side, trial in zip((sides.base, sides.candidate), pair, strict=True):
        assert trial.profile is not None
        side.append(trial.profile)
    return None


def _counted(history: TrialHistory, pair: Sequence[Trial], sides: Sides) -> Trial | None:
    """Count a pair whose processes took turns; return the candidate's trial if that failed."""
    base, candidate = pair
    if candidate.not_applied or base.profile is None or candidate.profile is None:
        return candidate
    found = (
        disturbances(each, each.profile, history.machine, in_turns=True)
        for each in pair
        if each.profile
    )
    why = next(filter(None, found), "")
    if why:
        history.disturbed += 1
        if not history.accepts_load:
            sides.disturbed.append(words(BUSY, why=why))
            return None
    sides.loaded += bool(why)
    sides.base.append(base.profile)
    sides.candidate.append(candidate.profile)
    sides.turned.append(compare_turns(pair))
    key = f"{key_of(base.recipe)} {key_of(candidate.recipe)}"
    history.turned.setdefault(key, []).append(sides.turned[-1].log_ratio)
    return None


def play_pair(
    history: TrialHistory, base: Recipe, candidate: Recipe, sides: Sides, *, starts_with_base: bool
) -> Asking[Trial | None]:
    """Ask for one pair; return the candidate's trial if that failed.

    A pair of which other work disturbed a trial does not count; under a load that the user accepts,
    one whose sides saw different loads. Nor does one whose base did not run: that says nothing of
    the candidate.
    """
    pair: dict[bool, Trial] = {}
    for recipe in (base, candidate) if starts_with_base else (candidate, base):
        if recipe is candidate:
            trial = yield from history.time(recipe, must_apply=True)
        elif sides.base:
            trial = yield from history.time(recipe)
        else:
            trial = yield from history.again(recipe)
        is_failed = trial.outcome is not Outcome.OK or trial.profile is None
        if recipe is candidate and (is_failed or trial.not_applied):
            return trial
        why = ""
        if is_failed:
            outcome = named("outcome", trial.outcome.value)
            why = words("row.base_failed", outcome=outcome, message=trial.message)
        elif trial.details.get("disturbed") and not history.accepts_load:
            why = words(BUSY, why=trial.details["disturbed"])
        if why:
            sides.disturbed.append(why)
            return None
        pair[recipe is base] = trial
        history.latest = trial if recipe is base else None
    shares = [foreign_share_of(trial) for trial in pair.values()]
    is_loaded = any(trial.details.get("disturbed") for trial in pair.values())
    if is_loaded and max(shares) - min(shares) > SAME_LOAD:
        taken = words("row.other_loads", one=f"{shares[0]:.0%}", other=f"{shares[1]:.0%}")
        sides.disturbed.append(words(BUSY, why=taken))
        return None
    sides.loaded += is_loaded
    first, second = pair[True].profile, pair[False].profile
    assert first is not None
    assert second is not None
    sides.base.append(first)
    sides.candidate.append(second)
    return None


def _evidence(history: TrialHistory, sides: Sides, rule: Rule) -> Evidence:
    if len(sides.turned) == len(sides.base):
        return _evidence_of_turns(history, sides, rule)
    base_s = [profile.whole_step_ms / 1e3 for profile in sides.base]
    candidate_s = [
        pace_ms(profile, base) / 1e3
        for profile, base in zip(sides.candidate, sides.base, strict=True)
    ]
    own = {*base_s, *(profile.whole_step_ms / 1e3 for profile in sides.candidate)}
    others = [[t for t in group if t not in own] for group in history.step_s.values()]
    prior = prior_of([g for g in others if g], rule)
    return gather(base_s, candidate_s, prior, rule, sides.in_process)


def _evidence_of_turns(history: TrialHistory, sides: Sides, rule: Rule) -> Evidence:
    logs = [one.log_ratio for one in sides.turned]
    prior = noise_of(sides.turned, (own for own in history.turned.values() if own != logs))
    ratios = [
        math.exp(one.log_ratio) * candidate.whole_step_ms / pace_ms(candidate, base)
        for one, base, candidate in zip(sides.turned, sides.base, sides.candidate, strict=True)
    ]
    return gather(ratios, [1.0] * len(ratios), prior, rule, sides.in_process)


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


MOST_DISTURBED = 2
"""Disturbed pairs after which a comparison is set aside; each trial was repeated already."""
SAME_LOAD = 0.1
"""Part of the cores: pairs whose sides saw foreign loads that differ by more do not count."""
LOADED_PAIRS = 3
"""Pairs at least before anything is said of a candidate under a load that the user accepted."""
MIN_STARTUP_S = 1.0
"""A longer start-up than the base's by less than this is noise, not compilation."""


def row_of(candidate: Candidate, base: Recipe, match: Match, check: LossCheck) -> Row:
    """Return the row of one candidate tried on top of `base`."""
    verdict, why = verdict_of(match, check)
    shown = match.candidate
    startup_s, break_even = _break_even(match)
    row = Row(
        choice=candidate.choice,
        numerics=check.promise or candidate.numerics.value,
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
    if shown and candidate.effect.peak_bytes < 0 and match.base is not None and not why:
        peaks = (match.base.peak_bytes, shown.peak_bytes)
        was, now = (format_bytes(peak.allocated or peak.device) for peak in peaks)
        row = replace(row, why=words("row.memory", now=now, was=was))
    return row.seen(shown)


def verdict_of(match: Match, check: LossCheck) -> tuple[Verdict, str]:
    """Return what is said about a technique, and why where that is not plain."""
    if match.failure is not None:
        return failed_verdict(match.failure)
    if match.decision is Decision.KEPT:
        kept_why = check.why if check.promise else ""
        return (Verdict.KEPT, kept_why) if check.passed else (Verdict.REJECTED, check.why)
    if match.decision is not Decision.UNDECIDED:
        return Verdict(match.decision.value), ""
    if match.disturbed:
        return Verdict.INCONCLUSIVE, words("row.not_measured", why=match.disturbed)
    return Verdict.INCONCLUSIVE, words("row.budget") if match.ran_out else ""


def failed_verdict(trial: Trial) -> tuple[Verdict, str]:
    """Return the verdict on a trial that gave no measurement of its recipe, and one line."""
    if trial.outcome not in (Outcome.OK, Outcome.REFUSED):
        return Verdict.FAILED, ended_with(trial)
    broken = [item for item in trial.not_applied if item.status == "failed"]
    missed = (broken or trial.not_applied)[0]
    newest = trial.recipe.names[-1]
    why = next(iter(missed.why.strip().splitlines()), "") or words("row.no_reason")
    # The row carries the newest technique's name; another one has to be named.
    if missed.technique != newest:
        why = words("joint.because", one=missed.technique, other=why)
    return Verdict.FAILED if broken else Verdict.NOT_APPLICABLE, why


def ended_with(trial: Trial) -> str:
    """Return how a trial without a measurement ended, and its message."""
    outcome = named("outcome", trial.outcome.value)
    return words("joint.because", one=outcome, other=trial.message)


def unchecked() -> LossCheck:
    """Return that the guard was not asked, since there is no gain."""
    return LossCheck(status="skipped", why=words("row.unchecked"))


def _break_even(match: Match) -> tuple[float, int | None]:
    """Return the extra start-up of the candidate and the steps that pay it back."""
    base, steady, all_of_them = match.base, match.candidate, match.sides.candidate
    if base is None or steady is None or not all_of_them:
        return 0.0, None
    # The first trial compiles what no earlier tuning compiled.
    startup_s = (all_of_them[0].warmup_ms - base.warmup_ms) / 1e3
    saved_s = (base.whole_step_ms - pace_ms(steady, base)) / 1e3
    if startup_s < MIN_STARTUP_S or saved_s <= 0:
        return max(0.0, startup_s), None
    return startup_s, int(startup_s / saved_s) + 1


def event_of(row: Row) -> str:
    """Return one line about a row for the running display."""
    pair = row.comparison
    shown = ""
    if pair is not None:
        interval = interval_of(pair.interval)
        shown = words("trying.shown", ratio=times(pair.ratio), interval=interval)
    return words(
        "trying.row",
        technique=row.choice.label,
        verdict=words(f"trying.verdict_{row.verdict.value}"),
        shown=shown,
        why=words("tuning.in_brackets", text=row.why) if row.why else "",
    )
