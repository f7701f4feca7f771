"""The ladder of a tuning: one technique after the other, each on top of those that were kept.

Techniques that a few pairs leave undecided are played together: two small gains that noise hides
one at a time, or that need each other, show as one. What is still open then gets its full pairs.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from flatout.analysis.loader_faults import fewer_workers
from flatout.records.ablation import Verdict
from flatout.records.messages import Text, code_of, joined, times, words
from flatout.records.profile import Profile
from flatout.records.statistics import Decision, Rule
from flatout.records.trial import Trial
from flatout.records.units import format_duration
from flatout.tuning.bundle import WORTH, all_of, is_time_short, settle_together, try_bundle
from flatout.tuning.experiments import Asking
from flatout.tuning.pairs import Match
from flatout.tuning.ranking import (
    HIDDEN,
    WORTH_A_TRIAL,
    Candidate,
    find_beyond,
    find_companion,
    find_pair,
    rank,
    typical_pairs,
)
from flatout.tuning.screening import can_screen, screen_first, screen_hope_per_s
from flatout.tuning.state import FIRST_GUARD_TRIALS, FIRST_PAIRS, Open, TuningState

SINGLE_PAIRS = 4
"""Pairs for one technique while it may still be played together with others."""
LOOKS_HELD = 0.5
"""Share of a gain that is left when it is measured again: what looks best in two noisy pairs is so
partly by luck."""
PROMISING = 1.01
"""An undecided technique with a smaller ratio than this brings nothing to the others."""


def climb(ladder: TuningState) -> Asking[None]:
    """Screen what can be switched, try the others one by one, then those that are still open.

    What was seen to help together goes first as one, before the screen where it promises more for
    its time: a screen of the computation shows little while the step waits for data. With too
    little time for both proofs it is on all through the screen, and one race proves all of it.
    Where nothing can be screened, the techniques on the computation are played as one then. Those
    that stay open are played together as soon as that promises more for its time than the next one.
    """
    looked = yield from _looked(ladder)
    ranked = rank(looked, ladder.search, ladder.experience)
    pair = _pair(ladder, looked)
    tried: set[str] = set()
    # The pairs of trials are played once for both, the start-ups are paid for each.
    pair_s = sum(x.cost_s for x in pair) - (len(pair) - 1) * ladder.cost_s
    goes_first = pair and sum(x.hope for x in pair) / pair_s > screen_hope_per_s(ladder, ranked)
    others = [x for x in ranked if x.choice.technique not in {y.choice.technique for y in pair}]
    is_short = goes_first and is_time_short(ladder, [*pair, *others])
    is_on = is_short and can_screen(ladder, ranked, pair)
    if goes_first and not is_on:
        viable = [] if can_screen(ladder, ranked) else _viable(ladder, looked, tried)
        yield from try_bundle(ladder, viable, pair, tried)
    tried |= yield from screen_first(ladder, ranked, pair if is_on else ())
    too_late: list[Candidate] = []
    while True:
        looked = yield from _looked(ladder)
        viable = _viable(ladder, looked, tried)
        pair = _pair(ladder, looked)
        if (yield from try_bundle(ladder, viable, pair, tried)):
            continue
        if not viable:
            break
        candidate = viable[0]
        # What saves memory only is predicted to cost time: no hope at all is not more than that.
        if ladder.has_time() and _hope_per_s(ladder) > max(0.0, candidate.hope_per_s):
            yield from _try_together(ladder)
            continue
        tried.add(candidate.choice.label)
        if _comes_too_late(ladder, candidate):
            if candidate.is_promising:
                ladder.stopped = _end_of_time(ladder, candidate)
            too_late.append(candidate)
            continue
        failure = yield from _try(ladder, candidate)
        if failure is not None:
            tried.add((yield from _try_fewer(ladder, candidate, failure)))
    yield from _try_together(ladder)
    yield from _try_longer(ladder)
    yield from _try_again(ladder)
    _note_untried(ladder, too_late)


def _is_cut_short(ladder: TuningState) -> bool:
    """Return whether the budget ended the pairs of what still looks like a gain."""
    is_open = any(_ratio(item) >= Rule().promising for item in _hopeful(ladder))
    return ladder.ran_out or (is_open and not ladder.has_time())


def _comes_too_late(ladder: TuningState, candidate: Candidate) -> bool:
    """Return whether the time left is too short for a candidate, or better spent."""
    if ladder.ran_out:
        return True
    left_over = ladder.budget.left_s - ladder.reserve_s - candidate.cost_s
    # With time for one more only, what looks better goes first: all the open ones together.
    if left_over < ladder.cost_s and _hope(ladder) > max(1.0, candidate.ratio):
        return True
    # What came in unproven may hurt by more than a small technique promises.
    if candidate.ratio < WORTH:
        unproven = ladder.passengers.intersection(ladder.recipe.names)
        left_over -= 2 * FIRST_PAIRS * len(unproven) * ladder.trial_s
    # A first technique is looked at even where there will be no time to prove it.
    return left_over < 0 and not ladder.is_first_look


def _end_of_time(ladder: TuningState, candidate: Candidate) -> str:
    """Return why there is no time for a candidate: there would be, but for what others took."""
    history = ladder.history
    # Under a load that was accepted each trial takes as much longer as others take of the cores.
    own = 1 - statistics.median(history.foreign_shares) if history.accepts_load else 1.0
    missing_s = own * (ladder.reserve_s + candidate.cost_s) - ladder.budget.left_s
    return "busy budget" if history.disturbed and history.lost_s >= missing_s else "budget"


def _note_untried(ladder: TuningState, too_late: Sequence[Candidate]) -> None:
    """Say which techniques were not tried, and why."""
    if ladder.stopped == "finished" and _is_cut_short(ladder):
        ladder.stopped = "budget"
    known = ladder.played | {row.choice.label for row in ladder.rows}
    late = {candidate.choice.label for candidate in too_late} | known
    unscreened = [x for x in ladder.unscreened if x.choice.label not in late]
    groups: dict[str, list[Text]] = {}
    for candidate in (*too_late, *unscreened):
        label = candidate.choice.label
        about = {"technique": label, "ratio": f"{candidate.ratio:.2f}"}
        said = words("tune_note.predicted", **about)
        if why := ladder.refused.get(label):
            said = words("tune_note.predicted_refused", **about, why=why)
        groups.setdefault("no_time_alone" if label in known else "no_time", []).append(said)
    for name, group in sorted(groups.items()):
        ladder.notes.append(words(f"tune_note.{name}", techniques=tuple(group)))
    if groups:
        ladder.notes.append(_time_needed(ladder))
    ladder.notes += ladder.scans.notes()
    by_reason: dict[str, list[str]] = {}
    for label, why in (ladder.passed_over | _without_use(ladder, too_late)).items():
        if label not in known:
            by_reason.setdefault(why, []).append(label)
    for why, labels in by_reason.items():
        note = "hidden" if code_of(why) == HIDDEN else "impossible"
        ladder.notes.append(words(f"tune_note.{note}", techniques=tuple(labels), why=why))


def note_beyond(ladder: TuningState) -> None:
    """Name the change of the data that promises most, where `--numerics` keeps it out."""
    found = find_beyond(ladder.profile, ladder.search, ladder.experience)
    if found is not None:
        about = {"technique": found.choice.technique, "why": found.effect.why}
        ladder.notes.append(words("tune_note.beyond", ratio=times(found.ratio), **about))


def _without_use(ladder: TuningState, too_late: Sequence[Candidate]) -> dict[str, str]:
    """Return the techniques that the user asked for and that nothing here speaks of."""
    known = {row.choice.technique for row in ladder.rows}
    known |= {label.split()[0] for label in (*ladder.passed_over, *ladder.played)}
    known |= {candidate.choice.technique for candidate in too_late}
    why = words("tune_note.no_use")
    return {name: why for name in ladder.search.only if name not in known}


def _time_needed(ladder: TuningState) -> str:
    """Say what a budget would have to be, from what a trial takes here."""
    typical = typical_pairs(in_turns=ladder.history.takes_turns)
    trials = 1 + 2 * typical + FIRST_GUARD_TRIALS + 2 * ladder.confirm_pairs
    one, proof = format_duration(ladder.trial_s), format_duration(trials * ladder.trial_s)
    another = format_duration(ladder.cost_s)
    return words("tune_note.time_needed", one=one, proof=proof, another=another)


def _looked(ladder: TuningState) -> Asking[Profile]:
    """Return the recipe's profile with all that was seen alongside its timed steps."""
    looked = ladder.looked(ladder.profile, ladder.recipe)
    left_s = ladder.budget.left_s - ladder.reserve_s
    scan = yield from ladder.scans.of(ladder.recipe, looked, left_s)
    return replace(looked, worker_scan=scan)


def _pair(ladder: TuningState, looked: Profile) -> list[Candidate]:
    """Return the two techniques that a scan saw to help together, while neither is in use."""
    pair = find_pair(looked, ladder.search, ladder.experience)
    in_use = ladder.settled.union(ladder.recipe.names)
    return [] if any(x.choice.technique in in_use for x in pair) else pair


def _viable(ladder: TuningState, looked: Profile, tried: set[str]) -> list[Candidate]:
    """Return the candidates that are worth a trial, the most hope first; note the others."""
    found = []
    for candidate in rank(looked, ladder.search, ladder.experience):
        choice = candidate.choice
        if choice.label in tried or choice.technique in ladder.settled:
            continue
        reason = candidate.find_reason_against(ladder.finest)
        if reason is None:
            found.append(candidate)
            ladder.passed_over.pop(choice.label, None)
        else:
            ladder.passed_over[choice.label] = reason
    return found


def _try_fewer(ladder: TuningState, candidate: Candidate, failure: Trial) -> Asking[str]:
    """Try workers that died or hung once more with half of them; return what was tried, or ""."""
    fewer = fewer_workers(failure.recipe, failure.details.get("fault"))
    if fewer is None or candidate.choice.technique != fewer.technique or not ladder.has_time():
        return ""
    row = ladder.rows[-1]
    again = words("row.again", n=str(fewer.settings["num_workers"]))
    ladder.rows[-1] = replace(row, why=joined(row.why, again))
    yield from _try(ladder, replace(candidate, choice=fewer))
    return fewer.label


def _try(ladder: TuningState, candidate: Candidate) -> Asking[Trial | None]:
    """Play one candidate against the recipe so far; keep it if it is faster and proven right.

    A technique that does not look faster in the first pairs may have made another one worth trying:
    workers pay only where threads leave them a core. Then both are played together. Returned is
    the candidate's trial that did not work, if any.
    """
    choice = candidate.choice
    ladder.say(choice.label)
    base, recipe = ladder.recipe, ladder.recipe.plus(choice)
    match = yield from ladder.play(recipe, Rule(max_pairs=FIRST_PAIRS))
    companion = None
    if match.decision is not Decision.KEPT and match.candidate is not None and not _leads(match):
        before = ladder.looked(ladder.profile, base)
        after = ladder.looked(match.candidate, recipe)
        companion = find_companion(before, after, candidate, ladder.search)
    is_open = match.decision is Decision.UNDECIDED and match.failure is None
    if is_open and companion is None and _has_time_for_more(ladder):
        match = yield from ladder.play(recipe, Rule(max_pairs=SINGLE_PAIRS, looks_ahead=True))
    row = yield from ladder.settle(candidate, recipe, match)
    if companion is not None and ladder.has_time():
        both = recipe.plus(companion.choice)
        ladder.say(both.label)
        together = yield from ladder.play(both, Rule())
        pair, names = all_of([candidate, companion]), (choice.technique,)
        joint = yield from ladder.settle(pair, both, together, together_with=names)
        if joint.verdict is Verdict.KEPT:
            why = words("row.no_gain_alone", technique=companion.choice.technique)
            place = ladder.rows.index(row)
            ladder.rows[place] = row = replace(row, verdict=Verdict.TOGETHER, why=why)
    if row.verdict is Verdict.INCONCLUSIVE and match.failure is None:
        ladder.undecided.append(Open(candidate=candidate, match=match, base=base, row=row))
    return match.failure


def _has_time_for_more(ladder: TuningState) -> bool:
    """Return whether the further pairs of one technique fit in."""
    typical = typical_pairs(in_turns=ladder.history.takes_turns)
    return ladder.has_time(for_candidates=(SINGLE_PAIRS - FIRST_PAIRS) / typical)


def _leads(match: Match) -> bool:
    """Return whether a technique looks faster on its own: then its next pairs come first."""
    return match.comparison is not None and match.comparison.ratio >= Rule().promising


def _hopeful(ladder: TuningState) -> list[Open]:
    """Return the undecided techniques that look like a gain and could still come in."""
    return [
        item
        for item in ladder.undecided
        if _ratio(item) >= PROMISING and item.candidate.choice.technique not in ladder.recipe.names
    ]


def _hope(ladder: TuningState) -> float:
    """Return what the hopeful techniques would bring together, were each what it looks like."""
    bundle = _bundle(ladder)
    return math.prod(_ratio(item) for item in bundle) if len(bundle) > 1 else 1.0


def _hope_per_s(ladder: TuningState) -> float:
    """Return the same in logs, for each second of playing them together; 0 where they were."""
    if _labels(_bundle(ladder)) <= ladder.bundled:
        return 0.0
    return LOOKS_HELD * math.log(_hope(ladder)) / ladder.cost_s


def _bundle(ladder: TuningState) -> list[Open]:
    """Return the hopeful techniques; of several settings of a technique the one that looks best."""
    hopeful = sorted(_hopeful(ladder), key=_ratio)
    return list({item.candidate.choice.technique: item for item in hopeful}.values())


def _labels(items: list[Open]) -> frozenset[str]:
    return frozenset(item.candidate.choice.label for item in items)


def _try_together(ladder: TuningState) -> Asking[None]:
    """Play all undecided techniques that look like a gain at once; keep them if they prove one."""
    bundle = _bundle(ladder)
    if len(bundle) < 2 or _labels(bundle) <= ladder.bundled or not ladder.has_time():
        return
    ladder.bundled = _labels(bundle)
    candidates = [item.candidate for item in bundle]
    recipe = ladder.recipe.plus(*(x.choice for x in candidates))
    ladder.say(recipe.label)
    match = yield from ladder.play(recipe, Rule())
    row, guilty = yield from settle_together(ladder, candidates, recipe, match)
    if guilty:
        ladder.undecided = [x for x in ladder.undecided if x.candidate.choice.label not in guilty]
        ladder.bundled = frozenset()  # the rest alone was not played yet
        yield from _try_together(ladder)
    if row.verdict is Verdict.KEPT:
        came_in = _labels(bundle)
        ladder.undecided = [x for x in ladder.undecided if x.candidate.choice.label not in came_in]
        why = words("row.undecided_alone", technique=row.choice.technique)
        for item in bundle[:-1]:
            place = ladder.rows.index(item.row)
            ladder.rows[place] = replace(item.row, verdict=Verdict.TOGETHER, why=why)


def _try_longer(ladder: TuningState) -> Asking[None]:
    """Give techniques that are still open the rest of their pairs, the most promising first."""
    while (hopeful := _hopeful(ladder)) and ladder.has_time():
        item = max(hopeful, key=_ratio)
        ladder.undecided.remove(item)
        recipe = ladder.recipe.plus(item.candidate.choice)
        ladder.say(item.candidate.choice.label)
        match = yield from ladder.play(recipe, Rule())
        if item.base == ladder.recipe:
            ladder.rows.remove(item.row)
        yield from ladder.settle(item.candidate, recipe, match)


def _try_again(ladder: TuningState) -> Asking[None]:
    """Try techniques again that noise hid, on top of the recipe so far, while there is time.

    Only where their interval left room for a gain that can be shown.
    """
    hidden = [
        item
        for item in ladder.undecided
        if item.base != ladder.recipe or (item.match.disturbed and not item.row.comparison)
    ]
    ranked = []
    if hidden:
        ranked = rank((yield from _looked(ladder)), ladder.search, ladder.experience)
    for candidate in ranked:
        choice = candidate.choice
        item = next((x for x in hidden if x.candidate.choice == choice), None)
        if item is None or choice.technique in ladder.settled.union(ladder.recipe.names):
            continue
        most = item.row.comparison.interval[1] if item.row.comparison else math.inf
        if most < WORTH_A_TRIAL or candidate.find_reason_against(ladder.finest) is not None:
            continue
        if not ladder.has_time():
            return
        ladder.undecided.remove(item)
        if item.match.disturbed and item.row in ladder.rows:
            ladder.rows.remove(item.row)
        recipe = ladder.recipe.plus(choice)
        ladder.say(choice.label)
        match = yield from ladder.play(recipe, Rule())
        yield from ladder.settle(candidate, recipe, match)


def _ratio(item: Open) -> float:
    return item.row.comparison.ratio if item.row.comparison else 0.0
