"""Bundle first: where the time is not enough for every technique, those that promise most as one.

One technique after the other is what a long tuning does: each gets its own proof. With time for
a few trials that leaves most techniques untried. Played as one recipe they cost what one of them
costs; what is kept is left out again one by one while there is time, so that no passenger stays
that hurts. A bundle that does not hold is cut in halves.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from flatout.records.ablation import LossCheck, Row, Verdict
from flatout.records.catalogue import technique_class
from flatout.records.messages import joined, words
from flatout.records.recipe import Recipe
from flatout.records.statistics import Rule
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial
from flatout.tuning.experiments import Asking
from flatout.tuning.pairs import Match, row_of
from flatout.tuning.ranking import Candidate
from flatout.tuning.state import FIRST_GUARD_TRIALS, TuningState, settle_guilty

WORTH = 1.05
"""Smallest predicted ratio of a passenger: leaving one out again costs as much as trying it."""
MOST_COST = 1.5
"""Times the cost of a technique that starts at once: what costs more is tried on its own, after
them."""
PROMISES = (Numerics.ROUNDING, Numerics.PRECISION)
"""Promises of the techniques that are played as one: they act on the computation. Those on the data
change what the loader's processes and the threads leave each other, and are tried on their own,
but for the workers and threads that a scan saw to help together."""


def try_bundle(
    ladder: TuningState, viable: Sequence[Candidate], pair: Sequence[Candidate], tried: set[str]
) -> Asking[bool]:
    """Play a bundle if one is due before the first of the candidates; say whether it was.

    `viable` begins with the most hope. What came in or refused, and needs no trial of its own any
    more, is added to `tried`.
    """
    bundle = find_bundle(ladder, viable, pair)
    if len(bundle) < 2 or not _goes_first(ladder, bundle, viable):
        return False
    tried |= yield from _play(ladder, bundle, _labels(pair))
    return True


def find_bundle(
    ladder: TuningState, viable: Sequence[Candidate], pair: Sequence[Candidate] = ()
) -> list[Candidate]:
    """Return the techniques to play as one: a pair, and others where time is short."""
    in_pair = {x.choice.technique for x in pair}
    others = [x for x in viable if x.choice.technique not in in_pair]
    waits = any(_labels(pair) <= labels for labels in ladder.bundles or ())
    pair = pair if waits or not ladder.has_played_pair else []
    members = [*pair, *_members(ladder, others)]
    if ladder.bundles is None:
        return members if is_time_short(ladder, [*pair, *others]) else list(pair)
    while ladder.bundles:
        half = [x for x in members if x.choice.label in ladder.bundles[0]]
        if len(half) > 1:
            return half
        ladder.bundles.pop(0)
    return list(pair)


def _members(ladder: TuningState, viable: Sequence[Candidate]) -> list[Candidate]:
    """Return one candidate for each technique, and for each family of alternatives.

    The one with the farthest-reaching promise is the last: its row stands for all of them.
    """
    found: dict[str, Candidate] = {}
    in_use = {rival_of(name) for name in ladder.recipe.names}
    for candidate in viable:
        rival = rival_of(candidate.choice.technique)
        is_member = candidate.numerics in PROMISES and candidate.ratio >= WORTH
        # One that is slow to start would make each trial of the others as long as its own.
        if is_member and rival not in in_use and candidate.cost_s <= MOST_COST * ladder.cost_s:
            found.setdefault(rival, candidate)
    return sorted(found.values(), key=lambda x: x.numerics.rank)


def rival_of(technique: str) -> str:
    """Return what only one technique of a recipe may be."""
    kind = technique_class(technique)
    return kind.family if kind.excludes_family else technique


def is_time_short(ladder: TuningState, viable: Sequence[Candidate]) -> bool:
    """Return whether time is short for what promises a gain, its guard and the confirmation."""
    guard_s = FIRST_GUARD_TRIALS * ladder.history.guard_cost_s(default=ladder.trial_s)
    proof_s = guard_s + 2 * ladder.confirm_pairs * ladder.trial_s
    return ladder.budget.left_s < proof_s + sum(x.cost_s for x in viable if x.is_promising)


def _goes_first(
    ladder: TuningState, bundle: Sequence[Candidate], viable: Sequence[Candidate]
) -> bool:
    """Return whether a bundle fits the time and no single technique promises more for it."""
    # The pairs are played once, the start-ups of all members are paid.
    cost_s = sum(x.cost_s for x in bundle) - (len(bundle) - 1) * ladder.cost_s
    left_over = ladder.budget.left_s - ladder.reserve_s - cost_s
    if left_over < 0 and not ladder.is_first_look:
        return False
    hope_per_s = sum(x.hope for x in bundle) / max(cost_s, 1e-3)
    in_bundle = {x.choice.technique for x in bundle}
    others = [x for x in viable[:1] if x.choice.technique not in in_bundle]
    return not others or hope_per_s > others[0].hope_per_s


def _play(
    ladder: TuningState, bundle: Sequence[Candidate], pair: frozenset[str]
) -> Asking[frozenset[str]]:
    """Play the techniques as one recipe; return the labels of those that need no trial any more."""
    labels = _labels(bundle)
    paired = pair if pair <= labels else frozenset[str]()
    ladder.has_played_pair |= bool(paired)
    base, recipe = ladder.recipe, ladder.recipe.plus(*(x.choice for x in bundle))
    ladder.say(recipe.label)
    match = yield from ladder.play(recipe, Rule())
    failure = match.failure
    refused = [x for x in bundle if x.choice.technique in _refusing(failure)]
    parts: list[frozenset[str]] = []
    if failure is not None and refused:  # as if it had been tried alone
        alone = ladder.recipe.plus(refused[0].choice)
        match = replace(match, failure=replace(failure, recipe=alone))
        yield from ladder.settle(refused[0], alone, match)
        done = _labels(refused[:1])
        parts = [labels - _with_partner(_labels(refused), paired)]
    else:
        row, guilty = yield from settle_together(ladder, bundle, recipe, match)
        done = _with_partner(guilty, paired)
        if guilty:
            parts = [labels - done]
        elif row.verdict is Verdict.KEPT:
            _note_passengers(ladder, bundle, base)
            done = labels
        else:
            parts = _halves(bundle, paired)
    # A pair on its own leaves the bundle of others to be found.
    if paired != labels or ladder.bundles is not None:
        ladder.bundles = [*parts, *(ladder.bundles or [frozenset()])[1:]]
    return done


def settle_together(
    ladder: TuningState, bundle: Sequence[Candidate], recipe: Recipe, match: Match
) -> Asking[tuple[Row, frozenset[str]]]:
    """Note the row of all together; return it, and the labels of what the guard rejects."""
    names = tuple(x.choice.technique for x in bundle[:-1])
    row = yield from ladder.settle(all_of(bundle), recipe, match, together_with=names)
    if row.verdict is not Verdict.REJECTED:
        return row, frozenset()
    guilty = frozenset(x.label for x in (yield from settle_guilty(ladder, recipe)))
    if guilty:
        rejects = words("row.guard_rejects", techniques=", ".join(sorted(guilty)))
        ladder.rows[-1] = replace(row, why=joined(row.why, rejects))
    return row, guilty


def _with_partner(gone: frozenset[str], paired: frozenset[str]) -> frozenset[str]:
    """Return what is left out: of a pair the other one is of no use without it."""
    return gone | paired if gone & paired else gone


def _note_passengers(ladder: TuningState, bundle: Sequence[Candidate], base: Recipe) -> None:
    """Add a row for each technique that came in with the last one, in front of that one's."""
    *others, last = bundle
    ladder.passengers |= {x.choice.technique for x in bundle}
    why = words("row.not_alone", technique=last.choice.technique)
    ladder.rows[-1:-1] = [
        replace(
            row_of(x, base, Match(), LossCheck(status="skipped")), verdict=Verdict.TOGETHER, why=why
        )
        for x in others
    ]


def _halves(bundle: Sequence[Candidate], paired: frozenset[str]) -> list[frozenset[str]]:
    """Return what to play after a bundle that did not hold; a pair is not cut."""
    if paired:
        return [paired, _labels(bundle) - paired] if paired < _labels(bundle) else []
    middle = len(bundle) // 2
    return [_labels(bundle[:middle]), _labels(bundle[middle:])]


def all_of(bundle: Sequence[Candidate]) -> Candidate:
    """Return the last technique with the prediction of all: its row stands for them."""
    ratio, last = math.prod(x.ratio for x in bundle), bundle[-1]
    return replace(last, ratio=ratio, bound=replace(last.bound, ratio=math.inf))


def _refusing(failure: Trial | None) -> frozenset[str]:
    """Return the techniques that refused, where that is why a trial gave no measurement."""
    if failure is None or failure.outcome not in (Outcome.OK, Outcome.REFUSED):
        return frozenset()
    missed = failure.not_applied
    # Where one refused, the trial ended at once: the hook points of others may not have been
    # reached yet.
    told = [item for item in missed if item.status != "unseen"]
    return frozenset(item.technique for item in told or missed)


def _labels(candidates: Sequence[Candidate]) -> frozenset[str]:
    return frozenset(x.choice.label for x in candidates)
