"""The screen: the first experiment of a tuning, in which one process says something on everything.

The script trains once while techniques are switched on and off between its steps; from that each
technique has its own effect with an interval, and the best recipe follows. It is then raced against
the recipe so far in fresh processes, as everything that is kept. What cannot be switched while the
script trains goes the other way: one after the other, in pairs of processes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flatout.analysis.regime import is_hopeless
from flatout.analysis.screen import (
    NOTHING_ON,
    Cell,
    ScreenBlock,
    ScreenEffect,
    ScreenFactor,
    ScreenFit,
    counting,
    find_suspects,
    fit_blocks,
    own_effects,
    whole_effect,
)
from flatout.records.ablation import Comparison, LossCheck, Row, Verdict
from flatout.records.catalogue import technique_class
from flatout.records.json_records import from_plain
from flatout.records.messages import interval_of, named, times, words
from flatout.records.recipe import Recipe
from flatout.records.statistics import Decision, Rule
from flatout.records.technique import can_switch
from flatout.records.trial import Trial
from flatout.tuning.bundle import all_of, rival_of
from flatout.tuning.experiments import ENDS, Asking
from flatout.tuning.pairs import Match, unchecked
from flatout.tuning.passes import find_seen
from flatout.tuning.ranking import WORTH_A_TRIAL, Candidate
from flatout.tuning.state import (
    FIRST_GUARD_TRIALS,
    RACES,
    TuningState,
    settle_guilty,
    with_attention_of,
)

FEWEST = 2
"""Techniques from which a screen pays: one alone is raced in pairs at once."""
MOST = 12
"""Techniques in one screen, those with the most hope first."""
SHARE = 0.35
"""Of the time before the confirmation: the races, the guard and what cannot be switched need the
rest."""
LEAST_S = 15.0
"""A screen of less time than this ends in its introductions."""
MOST_PROCESSES = 3
"""Processes, where a technique ends one of them: it is named, and the others go on without it."""
SLOW_START = 3.0
"""Times the wall time of a trial that a screen may take beyond its own time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Screened:
    """What a screen has shown."""

    effects: Mapping[str, ScreenEffect] = field(default_factory=dict)
    """By label each technique's own effect within the best recipe, or on top of it."""
    best: Cell = NOTHING_ON
    refused: Mapping[str, str] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    startup_s: Mapping[str, float] = field(default_factory=dict)
    credit: Sequence[ScreenBlock] = ()
    """Blocks of the best recipe, of it less one technique and of nothing."""
    blocks: Sequence[ScreenBlock] = ()
    """Those in which no technique was on that failed or refused."""
    steps: int = 0
    fit: ScreenFit | None = None

    @property
    def least_certain(self) -> str | None:
        """The technique of the best recipe whose gain is the least sure, where it is not sure."""
        open_ones = [x for x in self.best if self.effects[x].bound(0.998, -1) < math.log(1.02)]
        return min(
            open_ones,
            key=lambda x: self.effects[x].log_ratio / max(self.effects[x].error, 1e-9),
            default=None,
        )


def screen_first(
    ladder: TuningState, ranked: Sequence[Candidate], pair: Sequence[Candidate] = ()
) -> Asking[set[str]]:
    """Screen what can be switched, race what it proposes; return labels that need no trial more."""
    chosen = switchable(ladder, ranked)
    max_s = _time_s(ladder, pair)
    if len(chosen) < FEWEST:
        return set()
    if not can_screen(ladder, ranked, pair):
        ladder.notes.append(words("screen.too_little_time"))
        return set()
    ladder.say(words("trying.screen"))
    base = ladder.recipe.plus(*(x.choice for x in pair))
    found = yield from _screen(ladder, base, chosen, max_s)
    by_label = {x.choice.label: x for x in chosen}
    _note_lost(ladder, by_label, found)
    seen = {*found.effects, *found.failed, *found.refused}
    ladder.unscreened = [candidate for candidate in chosen if candidate.choice.label not in seen]
    if found.fit is None or not found.effects:
        ladder.notes.append(words("screen.too_few_steps", steps=str(found.steps)))
        return {*found.failed}
    ladder.notes.append(_words(found, found.fit))
    try:
        raced = yield from _race(ladder, found, by_label, pair)
    except ENDS:
        ended = dict.fromkeys(found.best, words("screen.ended"))
        _note_effects(ladder, found, by_label, Raced(undecided=ended), base)
        raise
    done = _note_effects(ladder, found, by_label, raced, base)
    if raced.open is not None:
        (first, *others), pair_of_all = raced.open
        raced_as_one = all_of([by_label[label] for label in (*others, first)])
        row = _row(ladder, raced_as_one, Verdict.INCONCLUSIVE, None)
        names = tuple(by_label[label].choice.technique for label in others)
        why = words(RACES[bool(names)], techniques=names)
        ladder.rows.append(replace(row, comparison=pair_of_all, together_with=names, why=why))
    return done | _note_pair(ladder, pair, raced)


def can_screen(
    ladder: TuningState, ranked: Sequence[Candidate], pair: Sequence[Candidate] = ()
) -> bool:
    """Return whether there is enough to switch, and the time for it."""
    return len(switchable(ladder, ranked)) >= FEWEST and _time_s(ladder, pair) >= LEAST_S


def _time_s(ladder: TuningState, pair: Sequence[Candidate] = ()) -> float:
    """Return the time for a screen; one with a pair on leaves the time to prove that."""
    proof_s = ladder.reserve_s
    if pair:
        guard_s = ladder.history.guard_cost_s(default=ladder.trial_s)
        proof_s += FIRST_GUARD_TRIALS * guard_s + ladder.cost_s
    return SHARE * (ladder.budget.left_s - proof_s)


def screen_hope_per_s(ladder: TuningState, ranked: Sequence[Candidate]) -> float:
    """Return what a screen and its race promise for a second, as a candidate's `hope_per_s`."""
    cost_s = max(_time_s(ladder), LEAST_S) + ladder.cost_s
    return sum(x.hope for x in switchable(ladder, ranked)) / cost_s


def switchable(ladder: TuningState, ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates to be screened: what can be switched, and is not hopeless by physics.

    What saves memory only is left to pairs, which read the peak.
    """
    found = []
    for candidate in ranked:
        is_known = candidate.choice.technique in ladder.recipe.names
        saves_only = candidate.effect.peak_bytes < 0 and candidate.ratio <= 1
        if is_known or saves_only or is_hopeless(candidate.bound, WORTH_A_TRIAL):
            continue
        if can_switch(technique_class(candidate.choice.technique)):
            found.append(candidate)
    return found[:MOST]


def factors_of(candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Return the techniques as the probe wants them: with their rivals and their partners."""
    families = {x.choice.label: x.family for x in candidates}
    found = []
    for candidate in candidates:
        choice = candidate.choice
        partners = technique_class(choice.technique).partners
        found.append(
            {
                "label": choice.label,
                "technique": choice.technique,
                "settings": dict(choice.settings),
                "group": rival_of(choice.technique),
                "partners": [label for label, family in families.items() if family in partners],
            }
        )
    return found


def _screen(
    ladder: TuningState, base: Recipe, chosen: Sequence[Candidate], max_s: float
) -> Asking[Screened]:
    """Ask for the screen on top of `base`, in a fresh process again where a technique ended it."""
    choices = factors_of(chosen)
    blocks: list[ScreenBlock] = []
    lost: dict[str, str] = {}
    refused: dict[str, str] = {}
    startup_s: dict[str, float] = {}
    credit: list[ScreenBlock] = []
    last: Mapping[str, Any] = {}
    steps = 0
    for number in range(MOST_PROCESSES):
        options = {"choices": choices, "max_s": max_s / (number + 1), "seed": number}
        limit_s = max_s + max(60.0, SLOW_START * ladder.trial_s)
        trial = yield from ladder.history.screen(base, options, number, limit_s)
        last = find_seen(trial, "screen") or blame(trial, blocks)
        seen = [from_plain(ScreenBlock, block) for block in last.get("blocks", ())]
        own = [replace(block, process=number) for block in seen]
        begins = last.get("credit_from")
        blocks += own
        credit = own[begins:] if begins is not None else []
        steps += int(last.get("steps", 0))
        startup_s |= last.get("startup_s", {})
        refused |= last.get("refused", {})
        new = {k: v for k, v in last.get("failed", {}).items() if k not in lost}
        lost |= new
        choices = [x for x in choices if x["label"] not in {*lost, *refused}]
        # A technique that was switched off in a process that went on is no reason for another one.
        if not last.get("ended_early") or not new or len(choices) < FEWEST:
            break
    # A tuning that is resumed may leave out what its screen had.
    labels = {x.choice.label for x in chosen}
    usable = [x for x in blocks if {*x.on} <= labels - {*lost, *refused}]
    credit = [x for x in credit if x in usable]
    effects, best, fit = judge(usable, credit, choices, last)
    return Screened(
        effects=effects,
        best=best,
        refused=refused,
        failed={label: why for label, why in lost.items() if label in labels},
        startup_s=startup_s,
        credit=credit,
        blocks=usable,
        steps=steps,
        fit=fit,
    )


def judge(
    blocks: Sequence[ScreenBlock],
    credit: Sequence[ScreenBlock],
    choices: Sequence[Mapping[str, Any]],
    seen: Mapping[str, Any],
) -> tuple[dict[str, ScreenEffect], Cell, ScreenFit | None]:
    """Return each technique's effect, the best recipe and the fit of all blocks.

    The effect of one in the best recipe is from the blocks in which it alone was left out, where
    there were enough of them: that is what it does there, without any model.
    """
    factors = [from_plain(ScreenFactor, choice) for choice in choices]
    fit = fit_blocks(blocks, factors)
    if fit is None:
        return {}, NOTHING_ON, None
    labels = [factor.label for factor in factors]
    on = tuple(x for x in seen.get("on", ()) if x in labels) if credit else NOTHING_ON
    own = own_effects(credit, factors, on)
    best = on or fit.best()
    effects = {label: own.get(label) or fit.effect(label, best) for label in labels}
    known = {label: effect for label, effect in effects.items() if effect is not None}
    best = tuple(
        x for x in best if x in known and known[x].bound(0.9, -1) > 0 and known[x].ratio >= 1.01
    )
    return known, best, fit


def blame(trial: Trial, before: Sequence[ScreenBlock]) -> Mapping[str, Any]:
    """Return what a process that ended badly had noted, and blame who was on last."""
    rows = trial.details.get("screen_log", ())
    blocks = [row["block"] for row in rows if "block" in row]
    on = tuple(rows[-1].get("on", ())) if rows else NOTHING_ON
    known = [*before, *(from_plain(ScreenBlock, block) for block in blocks)]
    failed = {}
    if on:
        blamed = find_suspects(on, known)[-1]
        failed[blamed] = words("screen.blamed", why=_ending(trial))
    steps = sum(block["steps"] for block in blocks)
    return {"blocks": blocks, "failed": failed, "steps": steps, "ended_early": True}


def _ending(trial: Trial) -> str:
    """Return how a process ended that gave no measurement."""
    return trial.message or named("outcome", trial.outcome.value)


def _words(found: Screened, fit: ScreenFit) -> str:
    count, thrown = len(found.effects), len(found.blocks) - len(counting(found.blocks))
    return words(
        "screen.done",
        techniques=words("screen.one" if count == 1 else "screen.many", n=str(count)),
        blocks=str(len(found.blocks)),
        thrown=words("screen.thrown", n=str(thrown)) if thrown else "",
        percent=f"{100 * fit.residual_sd:.1f}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Raced:
    """What became of the recipes that a screen proposed."""

    kept: Cell = NOTHING_ON
    check: LossCheck = field(default_factory=unchecked)
    guilty: Mapping[str, LossCheck] = field(default_factory=dict)
    """What the guard rejects of them."""
    undecided: Mapping[str, str] = field(default_factory=dict)
    """What was in a race that decided nothing, and why it did not."""
    open: tuple[Cell, Comparison] | None = None
    """The race that decided nothing and looks best, where none was won."""


def _race(
    ladder: TuningState,
    found: Screened,
    by_label: Mapping[str, Candidate],
    pair: Sequence[Candidate],
) -> Asking[Raced]:
    """Race what the screen proposes in fresh processes, with the pair that was on all the time.

    The best recipe goes first, then it without what is the least certain. What the guard rejects is
    left out, and the rest races again.
    """
    guilty: dict[str, LossCheck] = {}
    undecided: dict[str, str] = {}
    open_races: list[tuple[Cell, Comparison]] = []
    waiting = [found.best]
    if found.least_certain and len(found.best) > 1:
        waiting.append(tuple(x for x in found.best if x != found.least_certain))
    while waiting:
        cell = waiting.pop(0)
        if not cell:
            break
        # Of a pair the other one is of no use without it.
        on = () if any(x.choice.label in guilty for x in pair) else pair
        together = [*on, *(by_label[label] for label in cell)]
        recipe = ladder.recipe.plus(*(x.choice for x in together))
        ladder.say(recipe.label)
        # What was on all the time the screen cannot speak of.
        seen = None if on else whole_effect(found.credit, cell)
        match = yield from ladder.play(recipe, Rule(), seen)
        _note_race(ladder, recipe, match)
        if match.decision is not Decision.KEPT or match.candidate is None:
            if match.decision is Decision.UNDECIDED and match.comparison is not None:
                open_races.append((cell, match.comparison))
            undecided = _left_open(undecided, cell, match)
            if ladder.ran_out:
                break
            continue
        check = yield from ladder.history.check(recipe)
        if check.passed:
            if check.promise:
                ladder.notes.append(words("screen.checked", why=check.why))
            ladder.race = match if ladder.recipe == ladder.baseline else None
            ladder.recipe = recipe
            ladder.profile = with_attention_of(ladder.profile, match.candidate)
            ladder.settled |= {x.choice.technique for x in together}
            ladder.best_ratio *= match.comparison.ratio if match.comparison else 1.0
            return Raced(kept=cell, check=check, guilty=guilty, undecided=undecided)
        rejected = yield from settle_guilty(ladder, recipe)
        guilty |= {choice.label: check for choice in rejected}
        # Without a name only the whole is known to be wrong: each may still come in alone.
        together_why = words("screen.rejected_together", why=check.why)
        undecided = dict.fromkeys(cell, together_why)
        waiting = [tuple(x for x in cell if x not in guilty)] if rejected else []
    best = max(open_races, key=lambda race: race[1].ratio, default=None)
    return Raced(guilty=guilty, undecided=undecided, open=best)


def _left_open(before: Mapping[str, str], cell: Cell, match: Match) -> dict[str, str]:
    """Return what no race has decided so far and why, after one that was not won."""
    others = {label: why for label, why in before.items() if label not in cell}
    if match.decision is not Decision.UNDECIDED:
        return others
    why = words("screen.nothing_decided")
    if match.failure is not None:
        why = words("screen.failed_together", why=_ending(match.failure))
    elif match.disturbed:
        why = words("screen.not_measured", why=match.disturbed)
    return others | dict.fromkeys(cell, why)


def _note_race(ladder: TuningState, recipe: Recipe, match: Match) -> None:
    ladder.played |= {choice.label for choice in recipe.choices}
    pair = match.comparison
    shown = words("screen.race_nothing")
    if match.failure is not None:
        shown = words("screen.race_failed", why=_ending(match.failure))
    if pair is not None:
        shown = words(
            "screen.race_blocks" if pair.blocks else "screen.race_pairs",
            ratio=times(pair.ratio),
            interval=interval_of(pair.interval),
            n=str(pair.n),
            blocks=str(pair.blocks),
        )
    ladder.notes.append(words("screen.race_of", shown=shown, recipe=recipe.label))
    ladder.say("", event=words("screen.race", shown=shown))


def _note_lost(ladder: TuningState, by_label: Mapping[str, Candidate], found: Screened) -> None:
    """Add a row for each technique that failed; one that cannot be switched here gets its pairs."""
    ladder.refused |= found.refused
    for label, why in found.failed.items():
        row = _row(ladder, by_label[label], Verdict.FAILED, None)
        ladder.rows.append(replace(row, why=words("screen.lost", why=why)))


def _note_effects(
    ladder: TuningState,
    found: Screened,
    by_label: Mapping[str, Candidate],
    raced: Raced,
    base: Recipe,
) -> set[str]:
    """Add a row for each technique with its own effect; return what needs no trial any more.

    `base` is what was on all through the screen.
    """
    done, kept = {*found.failed}, raced.kept
    came_in = tuple(by_label[label].choice.technique for label in kept)
    rivals = set(map(rival_of, came_in))
    for label, effect in found.effects.items():
        candidate = by_label[label]
        technique = candidate.choice.technique
        verdict, why = verdict_of_effect(effect, is_rival=rival_of(technique) in rivals)
        if label in kept:
            verdict, why = Verdict.KEPT, "" if effect.interval[0] > 1 else words("screen.unsure")
        elif label in raced.guilty:
            verdict, why = Verdict.REJECTED, raced.guilty[label].why
        elif label in found.best:
            verdict = Verdict.INCONCLUSIVE
            why = raced.undecided.get(label, words("screen.not_shown"))
        startup_s = found.startup_s.get(label, 0.0)
        row = replace(
            _row(ladder, candidate, verdict, effect),
            on_top_of=tuple(x for x in (*base.names, *came_in) if x != technique),
            why=why,
            startup_s=startup_s,
        )
        if label in kept:
            steps = _break_even(ladder, startup_s, effect)
            row = replace(row, break_even_steps=steps, loss_check=raced.check)
        ladder.rows.append(row)
        if verdict is not Verdict.INCONCLUSIVE:
            done.add(label)
    return done


def _note_pair(ladder: TuningState, pair: Sequence[Candidate], raced: Raced) -> set[str]:
    """Add a row for each technique of a pair that was on all the time; return what is settled."""
    came_in = {x.choice.label for x in pair if x.choice in ladder.recipe.choices}
    for candidate in pair:
        choice = candidate.choice
        if choice.label in came_in:
            row = _row(ladder, candidate, Verdict.TOGETHER, None)
            ladder.rows.append(replace(row, why=words("screen.always_on")))
            ladder.passengers |= {choice.technique}
        elif choice.label in raced.guilty:
            row = _row(ladder, candidate, Verdict.REJECTED, None)
            ladder.rows.append(replace(row, why=raced.guilty[choice.label].why))
    return came_in


def verdict_of_effect(effect: ScreenEffect, *, is_rival: bool) -> tuple[Verdict, str]:
    """Return what a screen says about a technique that it does not propose."""
    if effect.bound(0.998, +1) < 0:
        return Verdict.WORSE, ""
    if effect.bound(0.95, +1) < math.log(Rule().gain):
        return Verdict.NO_EFFECT, ""
    if is_rival:
        return Verdict.NO_EFFECT, words("screen.rival")
    return Verdict.INCONCLUSIVE, words("screen.not_settled")


def _row(
    ladder: TuningState, candidate: Candidate, verdict: Verdict, effect: ScreenEffect | None
) -> Row:
    return Row(
        choice=candidate.choice,
        numerics=candidate.numerics.value,
        verdict=verdict,
        on_top_of=ladder.floor.names,
        comparison=comparison_of(effect) if effect else None,
        predicted_ratio=candidate.ratio,
        bound_ratio=candidate.bound.ratio if math.isfinite(candidate.bound.ratio) else None,
    )


def comparison_of(effect: ScreenEffect) -> Comparison:
    """Return an effect as the table has it."""
    return Comparison(
        ratio=effect.ratio,
        interval=effect.interval,
        n=effect.n,
        resolution=Rule().gain * math.exp(effect.bound(0.998, +1) - effect.log_ratio),
        source="screen",
    )


def _break_even(ladder: TuningState, startup_s: float, effect: ScreenEffect) -> int | None:
    """Return the steps that pay a start-up back, in the recipe as it is now."""
    saved_s = ladder.profile.whole_step_ms / 1e3 * (effect.ratio - 1)
    return int(startup_s / saved_s) + 1 if startup_s >= 1.0 and saved_s > 0 else None
