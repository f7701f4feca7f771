"""The ladder of a tuning: one lever after the other, each on top of those that were kept.

Levers that a few pairs leave undecided are played together: two small gains that noise hides one at
a time, or that need each other, show as one. What is still open then gets its full pairs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flatout.core.ablation import LossCheck, Row, Verdict
from flatout.core.pipeline import Pipeline
from flatout.core.profile import Profile
from flatout.core.progress import Progress
from flatout.core.recipe import Recipe
from flatout.core.stats import Decision, Rule
from flatout.core.trial import Trial
from flatout.core.units import format_duration
from flatout.techniques import technique_class
from flatout.workflow.faults import fewer_workers
from flatout.workflow.lab import Budget, Lab
from flatout.workflow.pairs import Match, play
from flatout.workflow.ranking import (
    TYPICAL_PAIRS,
    Candidate,
    Experience,
    Search,
    find_companion,
    rank,
)
from flatout.workflow.referee import Referee
from flatout.workflow.verdicts import event_of, row_of
from flatout.workflow.worker_scan import WorkerScans

Tell = Callable[[Progress], None]
FIRST_PAIRS = 2
"""Pairs after which a lever's own profile is asked what else it needs."""
SINGLE_PAIRS = 4
"""Pairs for one lever while it may still be played together with others."""
FIRST_GUARD_TRIALS = 5
"""Guard trials of the first recipe: before it the unchanged script twice and once in bf16."""
GUARD_TRIALS = 2
"""Guard trials of one more recipe, each about as long as a timed one: its gradients, and whether
its dropout acts."""
DEFAULT_TRIAL_S = 10.0
"""What a trial takes, before one was timed."""
LOOKS_HELD = 0.5
"""Share of a gain that is left when it is measured anew: what looks best in two noisy pairs is so
partly by luck."""
MORE_SHARE = (SINGLE_PAIRS - FIRST_PAIRS) / TYPICAL_PAIRS
"""What the further pairs of one lever cost, of a candidate's typical cost."""
PROMISING = 1.01
"""An undecided lever with a smaller ratio than this brings nothing to the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """A lever that the pairs so far did not decide."""

    candidate: Candidate
    match: Match
    base: Recipe
    """What it was played on top of."""
    row: Row


@dataclass(slots=True, kw_only=True)
class Ladder:
    """The state of one tuning."""

    lab: Lab
    budget: Budget
    tell: Tell
    referee: Referee
    search: Search
    confirm_pairs: int
    recipe: Recipe
    floor: Recipe = Recipe()
    """What the script does not run without."""
    profile: Profile
    """Of the recipe so far."""
    scans: WorkerScans
    pipeline: Pipeline | None = None
    """What a sample of the unchanged script costs by leg; None where nobody looked."""
    rows: list[Row] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    """Techniques that came in together: another setting of one would undo the other."""
    undecided: list[Open] = field(default_factory=list)
    bundled: frozenset[str] = frozenset()
    """Labels of the levers that were played together last."""
    best_ratio: float = 1.0
    passed_over: dict[str, str] = field(default_factory=dict)
    """Levers that were not tried, each with the reason; the latest profile decides."""
    notes: list[str] = field(default_factory=list)
    stopped: str = "finished"

    @property
    def baseline(self) -> Recipe:
        """The unchanged script, with the loaders that the recipe would touch."""
        return replace(self.floor, training_loaders=self.recipe.training_loaders)

    @property
    def finest(self) -> float:
        """The smallest gain that any pairs so far could show; no lever is held to a coarser one.

        Fewer pairs than decide without a prior do not know the noise, and count for nothing here.
        """
        pairs = [row.comparison for row in self.rows if row.comparison]
        known = [p.resolution for p in pairs if p.n >= Rule().min_pairs_without_prior]
        return min(known, default=1.0)

    @property
    def trial_s(self) -> float:
        """What one trial of the recipe so far takes."""
        return self.lab.cost_s(self.recipe, default=DEFAULT_TRIAL_S)

    @property
    def cost_s(self) -> float:
        """What trying one more candidate typically takes."""
        return 2 * TYPICAL_PAIRS * self.trial_s

    @property
    def experience(self) -> Experience:
        """What the outcomes so far say about predictions, and what a trial takes."""
        outcomes: dict[str, list[tuple[float, float]]] = {}
        for row in self.rows:
            if row.comparison and row.predicted_ratio and not row.together_with:
                family = technique_class(row.choice.technique).family
                pair = (row.predicted_ratio, row.comparison.ratio)
                outcomes.setdefault(family, []).append(pair)
        return Experience(outcomes=outcomes, trial_s=self.trial_s)

    @property
    def reserve_s(self) -> float:
        """The time to keep for the confirmation; nothing to confirm needs none."""
        if self.recipe == self.baseline:
            return 0.0
        one = self.trial_s
        pairs_s = self.confirm_pairs * (one + self.lab.cost_s(self.baseline, default=one))
        return pairs_s + GUARD_TRIALS * one

    def has_time(self, *, for_candidates: float = 1.0) -> bool:
        """Tell whether so many more candidates fit in before the confirmation."""
        return self.budget.left_s >= for_candidates * self.cost_s + self.reserve_s

    def play(self, recipe: Recipe, rule: Rule, *, earlier: Match | None = None) -> Match:
        """Play a recipe against the one so far while there is time before the confirmation."""
        one = self.trial_s

        def may_go_on() -> bool:
            pair_s = one + self.lab.cost_s(recipe, default=one)
            needed_s = self.reserve_s + pair_s if self.reserve_s else 0.0
            return self.budget.left_s > needed_s

        return play(
            self.lab,
            self.recipe,
            recipe,
            may_go_on=may_go_on,
            rule=rule,
            earlier=earlier,
        )

    def say(self, trying: str, *, event: str = "") -> None:
        """Report the progress."""
        self.tell(progress(self.budget, trying, self.best_ratio, event=event))


def progress(budget: Budget, trying: str, best_ratio: float = 1.0, *, event: str = "") -> Progress:
    """Return where a tuning stands in its budget."""
    return Progress(
        trying=trying,
        done_share=min(1.0, budget.elapsed_s / budget.total_s),
        elapsed_s=budget.elapsed_s,
        left_s=max(0.0, budget.left_s),
        best_ratio=best_ratio,
        event=event,
    )


def climb(ladder: Ladder) -> None:
    """Try one lever after the other, then those that are still open, together and alone.

    Those that stay open are played together as soon as that promises more for its time than the
    next lever does.
    """
    tried: set[str] = set()
    too_late: list[str] = []
    while (candidate := _next_candidate(ladder, tried)) is not None:
        if ladder.has_time() and _hope_per_s(ladder) > candidate.hope_per_s:
            _try_together(ladder)
            continue
        tried.add(candidate.choice.label)
        ladder.passed_over.pop(candidate.choice.label, None)
        # With time for one more only, what looks better goes first: all the open ones together.
        left_over = ladder.budget.left_s - ladder.reserve_s - candidate.cost_s
        gives_way = left_over < ladder.cost_s and _hope(ladder) > candidate.ratio
        # A first lever is looked at even where there will be no time to prove it.
        is_first = not ladder.rows and ladder.budget.left_s > FIRST_PAIRS * ladder.trial_s
        if gives_way or (left_over < 0 and not is_first):
            ladder.stopped = "budget"
            too_late.append(f"{candidate.choice.label} (predicted {candidate.ratio:.2f}x)")
            continue
        failure = _try(ladder, candidate)
        if failure is not None:
            tried.add(_try_fewer(ladder, candidate, failure))
    _try_together(ladder)
    _try_longer(ladder)
    if too_late:
        ladder.notes.append(f"not tried for lack of time: {', '.join(too_late)}")
        ladder.notes.append(_time_needed(ladder))
    ladder.notes += ladder.scans.notes()
    by_reason: dict[str, list[str]] = {}
    for label, why in ladder.passed_over.items():
        by_reason.setdefault(why, []).append(label)
    ladder.notes += [f"not tried: {', '.join(group)}: {why}" for why, group in by_reason.items()]


def _time_needed(ladder: Ladder) -> str:
    """Say what a budget would have to be, from what a trial takes here."""
    trials = 1 + 2 * TYPICAL_PAIRS + FIRST_GUARD_TRIALS + 2 * ladder.confirm_pairs
    one, proof = format_duration(ladder.trial_s), format_duration(trials * ladder.trial_s)
    return (
        f"a trial takes {one} here: to prove one lever takes about {proof}, to try another one "
        f"{format_duration(ladder.cost_s)} (--budget)"
    )


def _next_candidate(ladder: Ladder, tried: set[str]) -> Candidate | None:
    scan = ladder.scans.of(ladder.recipe, ladder.profile, ladder.budget.left_s - ladder.reserve_s)
    looked = replace(ladder.profile, pipeline=ladder.pipeline, worker_scan=scan)
    for candidate in rank(looked, ladder.search, ladder.experience):
        choice = candidate.choice
        if choice.label in tried or choice.technique in ladder.settled:
            continue
        reason = candidate.find_reason_against(ladder.finest)
        if reason is None:
            return candidate
        ladder.passed_over[choice.label] = reason
    return None


def _try_fewer(ladder: Ladder, candidate: Candidate, failure: Trial) -> str:
    """Try workers that died or hung once more with half of them; return what was tried, or ""."""
    fewer = fewer_workers(failure.recipe, failure.details.get("fault"))
    if fewer is None or candidate.choice.technique != fewer.technique or not ladder.has_time():
        return ""
    row = ladder.rows[-1]
    again = f"tried once more with num_workers={fewer.settings['num_workers']}"
    ladder.rows[-1] = replace(row, why=f"{row.why}; {again}")
    _try(ladder, replace(candidate, choice=fewer))
    return fewer.label


def _try(ladder: Ladder, candidate: Candidate) -> Trial | None:
    """Play one candidate against the recipe so far; keep it if it is faster and proven right.

    A lever that does not look faster in the first pairs may have made another one worth trying:
    workers pay only where threads leave them a core. Then both are played together. Returned is
    the candidate's trial that did not work, if any.
    """
    choice = candidate.choice
    ladder.say(choice.label)
    base, recipe = ladder.recipe, ladder.recipe.plus(choice)
    match = ladder.play(recipe, Rule(max_pairs=FIRST_PAIRS))
    companion = None
    if match.decision is not Decision.KEPT and match.candidate is not None and not _leads(match):
        companion = find_companion(ladder.profile, match.candidate, candidate, ladder.search)
    is_open = match.decision is Decision.UNDECIDED and match.failure is None
    if is_open and companion is None and ladder.has_time(for_candidates=MORE_SHARE):
        match = ladder.play(recipe, Rule(max_pairs=SINGLE_PAIRS, looks_ahead=True), earlier=match)
    row = _settle(ladder, candidate, recipe, match)
    if companion is not None and ladder.has_time():
        both = recipe.plus(companion.choice)
        ladder.say(both.label)
        together = ladder.play(both, Rule())
        _settle(ladder, companion, both, together, together_with=(choice.technique,))
    elif row.verdict is Verdict.INCONCLUSIVE and match.failure is None:
        ladder.undecided.append(Open(candidate=candidate, match=match, base=base, row=row))
    return match.failure


def _leads(match: Match) -> bool:
    """Tell whether a lever looks faster by itself: then its next pairs come first."""
    return match.comparison is not None and match.comparison.ratio >= Rule().promising


def _hopeful(ladder: Ladder) -> list[Open]:
    """Return the undecided levers that look like a gain and could still come in."""
    return [
        item
        for item in ladder.undecided
        if _ratio(item) >= PROMISING and item.candidate.choice.technique not in ladder.recipe.names
    ]


def _hope(ladder: Ladder) -> float:
    """Return what the hopeful levers would bring together, were each what it looks like."""
    bundle = _bundle(ladder)
    return math.prod(_ratio(item) for item in bundle) if len(bundle) > 1 else 1.0


def _hope_per_s(ladder: Ladder) -> float:
    """Return the same in logs, for each second of playing them together; 0 where they were."""
    if _labels(_bundle(ladder)) <= ladder.bundled:
        return 0.0
    return LOOKS_HELD * math.log(_hope(ladder)) / ladder.cost_s


def _bundle(ladder: Ladder) -> list[Open]:
    """Return the hopeful levers; of several settings of a technique the one that looks best."""
    hopeful = sorted(_hopeful(ladder), key=_ratio)
    return list({item.candidate.choice.technique: item for item in hopeful}.values())


def _labels(items: list[Open]) -> frozenset[str]:
    return frozenset(item.candidate.choice.label for item in items)


def _try_together(ladder: Ladder) -> None:
    """Play all undecided levers that look like a gain at once; keep them if they prove one."""
    bundle = _bundle(ladder)
    if len(bundle) < 2 or _labels(bundle) <= ladder.bundled or not ladder.has_time():
        return
    ladder.bundled = _labels(bundle)
    *others, last = bundle
    recipe = ladder.recipe
    for item in (*others, last):
        recipe = recipe.plus(item.candidate.choice)
    ladder.say(recipe.label)
    match = ladder.play(recipe, Rule())
    names = tuple(item.candidate.choice.technique for item in others)
    row = _settle(ladder, last.candidate, recipe, match, together_with=names)
    if row.verdict is Verdict.KEPT:
        ladder.undecided.clear()
        for item in others:
            place = ladder.rows.index(item.row)
            why = f"undecided alone; it came in together with {row.choice.technique}"
            ladder.rows[place] = replace(item.row, why=why)


def _try_longer(ladder: Ladder) -> None:
    """Give levers that are still open the rest of their pairs, the most promising first."""
    while (hopeful := _hopeful(ladder)) and ladder.has_time():
        item = max(hopeful, key=_ratio)
        ladder.undecided.remove(item)
        recipe = ladder.recipe.plus(item.candidate.choice)
        ladder.say(item.candidate.choice.label)
        # What was played on top of another recipe says little here: it starts anew.
        is_same = item.base == ladder.recipe
        match = ladder.play(recipe, Rule(), earlier=item.match if is_same else None)
        if is_same:
            ladder.rows.remove(item.row)
        _settle(ladder, item.candidate, recipe, match)


def _ratio(item: Open) -> float:
    return item.row.comparison.ratio if item.row.comparison else 0.0


def _settle(
    ladder: Ladder,
    candidate: Candidate,
    recipe: Recipe,
    match: Match,
    together_with: tuple[str, ...] = (),
) -> Row:
    """Note the row, and take the recipe on where it was kept."""
    check = LossCheck(status="skipped", why="not faster, so there was nothing to check")
    if match.decision is Decision.KEPT:
        check = ladder.referee.check(recipe)
    row = replace(row_of(candidate, ladder.recipe, match, check), together_with=together_with)
    if together_with and not row.why:
        row = replace(row, why=f"together with {', '.join(together_with)}")
    ladder.rows.append(row)
    if row.verdict is Verdict.KEPT and match.candidate is not None:
        ladder.recipe = recipe
        ladder.profile = match.candidate
        ladder.settled |= {candidate.choice.technique, *together_with} if together_with else set()
        ladder.best_ratio *= match.comparison.ratio if match.comparison else 1.0
    ladder.say("", event=event_of(row))
    return row
