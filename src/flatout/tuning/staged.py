"""The staged table of a tuning: the recipe measured as it grows, and each technique alone.

What the tuning has timed already is taken from there. The rest is timed once each, while there is
time: that shows where the gain came from, and decides nothing.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from flatout.analysis.training_length import find_length
from flatout.records.ablation import Comparison, Row, StagedRow, TrainingLength, staged_row
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Workload
from flatout.tuning.experiments import ENDS, Asking, TrialHistory
from flatout.tuning.pairs import pace_ms
from flatout.tuning.script_files import source_of
from flatout.tuning.turns import compare_turns

TIME_SHARE = 0.08
"""Of a tuning's budget, kept for this table."""


@dataclass(slots=True, kw_only=True)
class Measured:
    """What a tuning knows when its table is made."""

    history: TrialHistory
    baseline: Profile
    floor: Recipe
    """What the script does not run without."""
    recipe: Recipe
    rows: tuple[Row, ...]
    final: Profile | None
    """Of the whole recipe, as it was confirmed."""
    confirmation: Comparison | None
    """Of the whole recipe with the unchanged script: first and last row are as far apart."""
    left_s: Callable[[], float]
    is_over: bool = False
    """Whether Ctrl-C or a busy machine ended the measuring."""

    @property
    def before_per_s(self) -> float:
        """The unchanged script's samples a second, 0 where no one knows.

        Not the first run's: the proof is of runs in turn, and the report has one ratio.
        """
        if self.final is None or self.confirmation is None:
            return 0.0
        return self.final.samples_per_s / self.confirmation.ratio


def measure_stages(known: Measured) -> Asking[tuple[StagedRow, ...]]:
    """Return the rows of the table, the unchanged script first; none without a proven recipe.

    Where Ctrl-C or a busy machine ends the measuring, the other rows have no numbers of their own.
    """
    added = _in_order(known)
    if not added or known.final is None or known.confirmation is None:
        return ()
    first = staged_row(known.baseline, "pairs")
    stages = [replace(first, samples_per_s=known.before_per_s or None)]
    for number, choice in enumerate(added, start=1):
        later = added[number:]
        kept = tuple(x for x in known.recipe.choices if x not in later)
        stage = StagedRow(technique=choice.label, promise=_promise(known, choice))
        before_per_s = stages[-1].samples_per_s or 0.0
        stage = yield from _so_far(known, replace(known.recipe, choices=kept), stage, before_per_s)
        stages.append((yield from _alone(known, choice, stage)))
    return tuple(stages)


def _in_order(known: Measured) -> list[Choice]:
    """Return what was added, in the order of the table: as it came in.

    What one screen proposed came in at once: of that the largest effect goes first, for a small
    one may be there only on top of it.
    """
    added = [x for x in known.recipe.choices if x not in known.floor.choices]
    effects = {
        row.choice.label: row.comparison.ratio
        for row in known.rows
        if row.choice in added and row.comparison and row.comparison.source == "screen"
    }
    screened = [x for x in added if x.label in effects]
    largest = iter(sorted(screened, key=lambda x: -effects[x.label]))
    return [next(largest) if x in screened else x for x in added]


def length_of(workload: Workload, baseline: Profile) -> TrainingLength | None:
    """Return how long the whole training is, where the script says it plainly."""
    return find_length(source_of(workload), workload.arguments, baseline.epoch_steps)


def _so_far(
    known: Measured, recipe: Recipe, stage: StagedRow, before_per_s: float
) -> Asking[StagedRow]:
    """Add what the recipe up to this technique gives, on top of the row before.

    What pairs have shown of it is a ratio: between them and the proof the machine may have changed.
    """
    if recipe == known.recipe:
        assert known.final is not None
        return staged_row(known.final, "pairs", technique=stage.technique, promise=stage.promise)
    before = set(recipe.names) - {stage.technique.split()[0]}
    for row in known.rows:
        is_this = row.choice.label == stage.technique and {*row.on_top_of} == before
        if is_this and row.stage == "add" and not row.together_with and row.samples_per_s:
            ratio = row.comparison.ratio if row.comparison else 0.0
            return replace(
                stage,
                samples_per_s=before_per_s * ratio or row.samples_per_s,
                utilisation=row.device_busy_share
                if row.gpu_util_share is None
                else row.gpu_util_share,
                peak_bytes=row.peak_bytes.allocated or row.peak_bytes.device or None,
                source="pairs",
            )
    found = yield from _timed(known, recipe)
    if found is None:
        return stage
    profile, ratio = found
    timed = staged_row(profile, "run", technique=stage.technique, promise=stage.promise)
    per_s = ratio * known.before_per_s
    return replace(timed, samples_per_s=per_s) if per_s else timed


def _alone(known: Measured, choice: Choice, stage: StagedRow) -> Asking[StagedRow]:
    """Add what the technique gives without the others."""
    added = _in_order(known)
    pair = known.confirmation if len(added) == 1 else _pair_alone(known, choice)
    if pair is not None and pair.source == "pairs":
        return replace(stage, alone=pair.ratio, alone_source=pair.source)
    if choice == added[0] and stage.samples_per_s and known.before_per_s:
        # The first step of the recipe is the technique alone.
        alone = stage.samples_per_s / known.before_per_s
        return replace(stage, alone=alone, alone_source=stage.source)
    found = yield from _timed(known, known.floor.plus(choice))
    if found is not None:
        return replace(stage, alone=found[1], alone_source="run")
    if pair is not None:
        return replace(stage, alone=pair.ratio, alone_source=pair.source)
    return stage


def _pair_alone(known: Measured, choice: Choice) -> Comparison | None:
    """Return the comparison of one technique with the unchanged script, or its effect in a screen.

    A screen's effect is that within the recipe, which its source says.
    """
    found = None
    for row in known.rows:
        if row.choice != choice or row.stage != "add" or row.together_with or not row.comparison:
            continue
        if row.comparison.source == "screen":
            found = found or row.comparison
        elif {*row.on_top_of} == {*known.floor.names}:
            return row.comparison
    return found


def _timed(known: Measured, recipe: Recipe) -> Asking[tuple[Profile, float] | None]:
    """Time a recipe once, where there is time for it: its profile, and how much faster it is.

    None where it gave no measurement. In turns with the unchanged script where that is possible.
    """
    recipe = replace(recipe, training_loaders=known.recipe.training_loaders)
    started_s = max((x.startup_s for x in known.rows if x.choice in recipe.choices), default=0.0)
    expected_s = known.history.cost_s(known.recipe, 0.0) + started_s
    if known.is_over or known.left_s() < known.history.cost_s(recipe, expected_s):
        return None
    try:
        base = replace(known.floor, training_loaders=recipe.training_loaders)
        pair = yield from known.history.in_turns(base, recipe, starts_with_base=True)
        trial = pair[1] if pair else (yield from known.history.time(recipe))
    except ENDS:
        known.is_over = True
        return None
    is_disturbed = trial.details.get("disturbed") and not known.history.accepts_load
    is_sound = trial.outcome is Outcome.OK and not is_disturbed and not trial.not_applied
    if not is_sound or trial.profile is None:
        return None
    before = known.baseline
    if pair:
        ratio = math.exp(compare_turns(pair).log_ratio)
        return trial.profile, ratio * trial.profile.whole_step_ms / pace_ms(trial.profile, before)
    ratio = before.whole_step_ms / pace_ms(trial.profile, before)
    if known.before_per_s and before.samples_per_s:
        ratio *= before.samples_per_s / known.before_per_s
    return trial.profile, ratio


def _promise(known: Measured, choice: Choice) -> str:
    """Return what the technique may do to the numbers: its own promise, or a weaker one kept."""
    about = [row for row in known.rows if row.choice.technique == choice.technique]
    promises = [Numerics(row.numerics) for row in about if row.stage == "add"]
    return max(promises, key=lambda promise: promise.rank).value if promises else ""
