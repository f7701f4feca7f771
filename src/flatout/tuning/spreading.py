"""The way a training for one device is spread over several: timed before anything else is tried.

Each way is compared with one device in fresh pairs. The fastest one that is proven faster becomes
the baseline of everything after it; with none of them the tuning goes on with one device.
"""

from collections.abc import Sequence
from dataclasses import replace

from flatout.records.ablation import LossCheck, Row, Verdict
from flatout.records.catalogue import setter_of, technique_class
from flatout.records.live import Tell
from flatout.records.messages import Text, interval_of, times, words
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Decision, Rule
from flatout.records.trial import Outcome, Trial
from flatout.tuning.experiments import ENDS, Asking, TrialHistory, stop_of
from flatout.tuning.pairs import Match, play, verdict_of
from flatout.tuning.ranking import Search
from flatout.tuning.rescue import Baseline
from flatout.tuning.state import progress

WAYS = (0, 2, 3)
"""Stages of ZeRO: a whole model on each device, or one that is sharded. What a script for one
device can be spread by; layers and products are split for a Task."""
SHARE = 0.3
"""Of the budget, at most, but for a first look at each way."""
PAIRS = 4
SPREAD_PAYS = 1.2
"""A smaller gain is not worth the devices: the planner warns below it too."""
NOT_FASTER = (Verdict.WORSE, Verdict.NO_EFFECT)


def find_way(
    history: TrialHistory, search: Search, alone: Baseline, ranks: int, tell: Tell
) -> Asking[Baseline]:
    """Time each way to spread the training over so many ranks, and one device against them.

    One pair of each comes first, as far as there is time; then the rest of their pairs, for what
    looked fastest first.
    """
    if not _is_allowed(search):
        refused = words("spread.not_allowed", technique=setter_of("ranks"))
        return replace(alone, notes=(*alone.notes, refused))
    choices, floor = _ways(ranks), alone.recipe
    timed: dict[str, Match] = {}
    best, trial, note, stopped = None, alone.trial, "", ""
    try:
        yield from _time_ways(history, floor, choices, timed, tell)
        # The ranks themselves compare what they train.
        kept = {label for label, match in timed.items() if match.decision is Decision.KEPT}
        proven = [x for x in choices if x.label in kept]
        best = max(proven, key=lambda x: _ratio(timed[x.label]), default=None)
        if best is not None:
            trial = yield from history.again(floor.plus(best))
            if trial.outcome is not Outcome.OK or trial.profile is None:
                note = words("spread.not_again", way=best.label, why=trial.message)
    except ENDS as end:
        stopped = stop_of(end)
    if note or stopped:
        best, trial = None, alone.trial
    rows = tuple(_row(x, floor, timed[x.label], best=best) for x in choices if x.label in timed)
    notes = [] if stopped else [note or _words(rows, ranks, best)]
    untried = ", ".join(x.label for x in choices if x.label not in timed)
    if untried:
        notes.append(words("tune_note.no_time", techniques=untried))
    return Baseline(
        recipe=floor.plus(best) if best else floor,
        trial=trial,
        rows=(*alone.rows, *rows),
        notes=(*alone.notes, *notes),
        stopped=stopped,
    )


def make_it_fit(
    history: TrialHistory, search: Search, first: Trial, ranks: int, tell: Tell
) -> Asking[Baseline | None]:
    """Return the first way in which a training runs that one device is too small for, if any."""
    choices = _ways(ranks)
    if search.machine.device.kind != "cpu":  # the slowest way, for what fits in no other
        settings = {"ranks": ranks, "zero": 3, "offload": True}
        choices.append(Choice(technique=setter_of("ranks"), settings=settings))
    for choice in choices if _is_allowed(search) else ():
        tell(progress(history.budget, choice.label))
        recipe = Recipe().plus(choice)
        trial = yield from history.time(recipe)
        if trial.outcome is Outcome.OK and trial.profile is not None:
            row = _row(choice, Recipe(), Match(candidate=trial.profile), best=choice)
            row = replace(row, verdict=Verdict.KEPT, why=words("spread.too_small"))
            note = words("spread.baseline", message=first.message, way=choice.label)
            return Baseline(recipe=recipe, trial=trial, rows=(row,), notes=(note,))
    return None


def _ways(ranks: int) -> list[Choice]:
    name = setter_of("ranks")
    return [Choice(technique=name, settings={"ranks": ranks, "zero": zero}) for zero in WAYS]


def _is_allowed(search: Search) -> bool:
    """Return whether the user allows it; --gpus asks for it as much as --only would."""
    name = setter_of("ranks")
    return name not in search.skip and search.ceiling.allows(technique_class(name).numerics)


def _time_ways(
    history: TrialHistory,
    alone: Recipe,
    choices: Sequence[Choice],
    timed: dict[str, Match],
    tell: Tell,
) -> Asking[None]:
    """Put what the pairs of each way show into `timed`, by its label."""
    budget = history.budget
    ends_at = budget.elapsed_s + SHARE * budget.total_s

    def pairs_of(choice: Choice, most: int) -> Asking[None]:
        tell(progress(budget, choice.label))
        before = timed.get(choice.label)
        timed[choice.label] = yield from play(
            history,
            alone,
            alone.plus(choice),
            may_go_on=lambda _: budget.elapsed_s < ends_at,
            rule=Rule(max_pairs=most, patience=2),
            sides=before.sides if before else None,
        )

    for choice in choices:
        if not timed or budget.elapsed_s < ends_at:
            yield from pairs_of(choice, 1)
    for choice in sorted(choices, key=lambda x: -_ratio(timed.get(x.label))):
        if _ratio(timed.get(choice.label)) and budget.elapsed_s < ends_at:
            yield from pairs_of(choice, PAIRS)


def _ratio(match: Match | None) -> float:
    return match.comparison.ratio if match and match.comparison else 0.0


def _row(choice: Choice, floor: Recipe, match: Match, *, best: Choice | None) -> Row:
    verdict, why = verdict_of(match, LossCheck(status="same"))
    if verdict is Verdict.KEPT and choice != best:
        why = words("spread.other_way" if best else "spread.not_taken")
        verdict = Verdict.INCONCLUSIVE
    return Row(
        choice=choice,
        numerics=technique_class(choice.technique).numerics.value,
        verdict=verdict,
        on_top_of=floor.names,
        comparison=match.comparison,
        loss_check=LossCheck(status="skipped", why=words("spread.unchecked")),
        why=why,
        stage="spread",
    ).seen(match.candidate)


def _words(rows: tuple[Row, ...], ranks: int, best: Choice | None) -> str:
    """Return one line on the ways: which one, or that one device is enough."""
    shown = tuple(map(_shown, rows))
    if best is None:
        name = "none_measured"
        if any(row.comparison for row in rows):
            is_settled = len(rows) == len(WAYS) and all(row.verdict in NOT_FASTER for row in rows)
            name = "none_faster" if is_settled else "none_shown"
        return words(f"spread.{name}", ranks=str(ranks), shown=shown)
    pair = next(row.comparison for row in rows if row.choice == best)
    taken = words("spread.taken", shown=shown, way=best.label)
    if pair is not None and pair.ratio >= SPREAD_PAYS:
        return taken
    return words("spread.doubtful", taken=taken, ranks=str(ranks))


def _shown(row: Row) -> Text:
    """Return what was measured of one way."""
    pair = row.comparison
    if pair is None:
        return words("spread.unmeasured", way=row.choice.label, why=row.why)
    return words(
        "spread.way",
        way=row.choice.label,
        ratio=times(pair.ratio),
        interval=interval_of(pair.interval),
        n=str(pair.n),
    )
