"""The way a training for one device is spread over several: timed before anything else is tried.

Each way is compared with one device in fresh pairs. The fastest one that is proven faster becomes
the baseline of everything after it; with none of them the tuning goes on with one device.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from flatout.records.ablation import LossCheck, Row, Verdict
from flatout.records.catalogue import setter_of, technique_class
from flatout.records.live import Progress
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Rule
from flatout.records.trial import Outcome, Trial
from flatout.records.units import format_interval, format_ratio
from flatout.tuning.experiments import Asking, TrialHistory
from flatout.tuning.pairs import Match, play, verdict_of
from flatout.tuning.state import progress

WAYS = (0, 2, 3)
"""Stages of ZeRO: a whole model on each device, or one that is sharded. What a script for one
device can be spread by; layers and products are split for a Task."""
SHARE = 0.3
"""Of the budget, at most, but for a first look at each way."""
PAIRS = 4
SPREAD_PAYS = 1.2
"""A smaller gain is not worth the devices: the planner warns below it too."""
NOT_FASTER = (Verdict.WORSE, Verdict.NO_EFFECT, Verdict.FAILED, Verdict.NOT_APPLICABLE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """How the training is spread, and what was seen of the ways."""

    recipe: Recipe
    trial: Trial
    """Of that recipe: the baseline from now on."""
    rows: tuple[Row, ...] = ()
    notes: list[str] = field(default_factory=list)


def find_way(
    history: TrialHistory,
    floor: Recipe,
    first: Trial,
    ranks: int,
    tell: Callable[[Progress], None],
) -> Asking[Way]:
    """Time each way to spread the training over so many ranks, and one device against them.

    Args:
        history: what was measured so far.
        floor: what the script does not run without.
        first: its trial, on one device.
        ranks: processes, one for each device.
        tell: shown what is being tried.
    """
    budget = history.budget
    ends_at = budget.elapsed_s + SHARE * budget.total_s
    timed: list[tuple[Choice, Match]] = []
    for zero in WAYS:
        if timed and budget.elapsed_s >= ends_at:
            break
        choice = Choice(technique=setter_of("ranks"), settings={"ranks": ranks, "zero": zero})
        tell(progress(budget, choice.label))
        match = yield from play(
            history,
            floor,
            floor.plus(choice),
            may_go_on=lambda _: budget.elapsed_s < ends_at,
            rule=Rule(max_pairs=PAIRS, patience=2),
        )
        timed.append((choice, match))
    proven = [(choice, match) for choice, match in timed if _verdict(match)[0] is Verdict.KEPT]
    best, _ = max(proven, key=lambda way: _ratio(way[1]), default=(None, None))
    rows = tuple(_row(choice, floor, match, best=best) for choice, match in timed)
    notes = [_words(rows, ranks, best)]
    if best is None:
        return Way(recipe=floor, trial=first, rows=rows, notes=notes)
    recipe = floor.plus(best)
    trial = yield from history.again(recipe)
    if trial.outcome is not Outcome.OK or trial.profile is None:
        notes.append(f"{best.label} did not run once more ({trial.message}): on one device instead")
        return Way(recipe=floor, trial=first, rows=rows, notes=notes)
    return Way(recipe=recipe, trial=trial, rows=rows, notes=notes)


def _ratio(match: Match) -> float:
    return match.comparison.ratio if match.comparison else 0.0


def _verdict(match: Match) -> tuple[Verdict, str]:
    """Return what is said of a way; the ranks themselves compare what they train."""
    return verdict_of(match, LossCheck(status="same"))


def _row(choice: Choice, floor: Recipe, match: Match, *, best: Choice | None) -> Row:
    verdict, why = _verdict(match)
    if verdict is Verdict.KEPT and choice != best:
        verdict, why = Verdict.NO_EFFECT, "another way to spread the training is faster"
    row = Row(
        choice=choice,
        numerics=technique_class(choice.technique).numerics.value,
        verdict=verdict,
        on_top_of=floor.names,
        comparison=match.comparison,
        loss_check=LossCheck(status="skipped", why="ranks compare what they train with each other"),
        why=why,
        stage="spread",
    )
    shown = match.candidate
    if shown is None:
        return row
    return replace(
        row,
        samples_per_s=shown.samples_per_s,
        device_busy_share=shown.device_busy_share,
        gpu_util_share=shown.gpu_util_share,
        peak_bytes=shown.peak_bytes,
    )


def _words(rows: tuple[Row, ...], ranks: int, best: Choice | None) -> str:
    """Return one line on the ways: which one, or that one device is enough."""
    shown = ", ".join(
        f"{row.choice.label} {format_ratio(pair.ratio)} ({format_interval(*pair.interval)}, "
        f"n={pair.n})"
        if (pair := row.comparison)
        else f"{row.choice.label} no measurement ({row.why})"
        for row in rows
    )
    if best is None:
        is_settled = all(row.verdict in NOT_FASTER for row in rows)
        what = "is faster" if is_settled else "was shown to be faster"
        return f"stay on one device: no way to spread this training over {ranks} {what}: {shown}"
    pair = next(row.comparison for row in rows if row.choice == best)
    pays = pair is not None and pair.ratio >= SPREAD_PAYS
    doubt = "" if pays else f"; {ranks} devices for that are hardly worth it"
    return f"against one device: {shown}; the baseline from here on is {best.label}{doubt}"
