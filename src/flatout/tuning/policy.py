"""The policy of a tuning: which experiment comes next, given those so far.

This file is the tuner from its beginning to its end; each step is explained where it is defined.

1. The unchanged script is timed (`_baseline`); where it does not run, it is rescued. For several
   devices the ways to spread it are timed (`spreading`).
2. One or two runs look at what timed steps do not show (`_look`), and one changes the number of
   loader workers while the training goes on (`worker_scan`).
3. `climb`: a screen in one process, a race of what it proposes, then pairs of fresh processes for
   what cannot be switched, by hope per second.
4. What may no longer pay is left out once more (`_drop_one`), and the whole recipe is confirmed in
   fresh pairs (`_confirm`): winners of many looks are biased upwards. A packed sample that stands
   for all data shows what packing them would bring (`_time_packed`).
5. The recipe is measured as it grows (`measure_stages`).

What is asked for is run by `flatout.workflow.tune`; a journal's records lead through the same
experiments again without running any.
"""

import functools
import math
from dataclasses import dataclass, field, replace

from flatout.records.ablation import Comparison, Feeding, LossCheck, Row, StagedRow, Verdict
from flatout.records.errors import UserError
from flatout.records.live import Tell
from flatout.records.machine import Machine
from flatout.records.messages import code_of, named, words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.statistics import Decision, Rule
from flatout.records.technique import Numerics
from flatout.records.trial import TECHNIQUE_NOTE, Outcome, Trial
from flatout.tuning.experiments import ENDS, Asking, Budget, TrialHistory, stop_of
from flatout.tuning.extra_profiling import Looks, look_closer
from flatout.tuning.feeding import (
    StoredSample,
    find_feeding,
    is_about_data,
    look,
    time_stored_sample,
)
from flatout.tuning.history import Errors
from flatout.tuning.ladder import climb, note_beyond
from flatout.tuning.pairs import BUSY, Match, play, verdict_of
from flatout.tuning.ranking import Search
from flatout.tuning.rescue import Baseline, make_it_run, retry_with_fewer_workers
from flatout.tuning.spreading import find_way, make_it_fit
from flatout.tuning.staged import TIME_SHARE, Measured, measure_stages
from flatout.tuning.state import OVERDRAFT, TuningState, progress
from flatout.tuning.turns import can_take_turns
from flatout.tuning.worker_scan import WorkerScans

CONFIRM_PAIRS = 3
"""Fresh pairs of the whole recipe against the baseline, at least."""
DROP_AFTER = 2
"""Pairs at least before a technique that was proven once is left out again."""
DROP_PAIRS = 4
"""Pairs at most to show that a kept technique still pays; undecided leaves it in."""


class BaselineFailedError(UserError):
    """The script does not run on its own; its trial says why."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(f"the unchanged script did not give a measurement: {trial.message}")
        self.trial = trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTask:
    """What a tuning begins with: all that its decisions depend on, apart from the records."""

    machine: Machine
    budget_s: float = 600.0
    numerics: Numerics = Numerics.PRECISION
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    accepts_load: bool = False
    confirm_pairs: int = CONFIRM_PAIRS
    ranks: int = 1
    """Devices to spread the training over, where that is faster."""
    hosts: int = 1
    """On which pairs may be played, this one among them."""
    takes_turns: bool = False
    """Whether the two processes of a pair may run at the same time, where that is possible."""
    stored_sample: StoredSample | None = None
    """What stands for all data, to time what packing them would bring."""
    earlier: Errors = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeProof:
    """The whole recipe against the baseline."""

    confirmation: Comparison | None = None
    final: Profile | None = None
    check: LossCheck | None = None
    feeding: Feeding | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Where a tuning ended."""

    state: TuningState
    baseline: Profile
    proof: RecipeProof
    stages: tuple[StagedRow, ...] = ()


def budget_of(task: TuningTask) -> Budget:
    """Return the time of a tuning but for what measuring the stages may take."""
    return Budget(total_s=(1 - TIME_SHARE) * task.budget_s)


def tuning(task: TuningTask, budget: Budget, tell: Tell) -> Asking[Tuned]:
    """Ask for one experiment after the other; equal records lead to equal experiments.

    Raises:
        BaselineFailedError: if the unchanged script gives no measurement.
    """
    history = TrialHistory(
        machine=task.machine, budget=budget, accepts_load=task.accepts_load, hosts=task.hosts
    )
    search = Search(machine=task.machine, ceiling=task.numerics, only=task.only, skip=task.skip)
    way = yield from _baseline(history, search, task.ranks, tell)
    first, floor, stopped = way.trial, way.recipe, way.stopped
    assert first.profile is not None
    history.takes_turns = task.takes_turns and can_take_turns(first, task.machine)
    loaders = tuple(loader.address for loader in first.profile.training_loaders)
    floor = history.floor = replace(floor, training_loaders=loaders)
    looks = Looks()
    try:
        looks = looks if stopped else (yield from _look(history, search, floor, first, tell))
    except ENDS as end:
        stopped = stop_of(end)
    baseline = looks.added_to(first.profile, floor.names, floor.names)
    state = TuningState(
        history=history,
        budget=history.budget,
        tell=tell,
        search=search,
        confirm_pairs=task.confirm_pairs,
        recipe=floor,
        floor=floor,
        profile=baseline,
        scans=WorkerScans(history=history, search=search),
        looks=looks,
        earlier=task.earlier,
        rows=[*way.rows],
        settled={choice.technique for choice in floor.choices},
        notes=[*way.notes],
        stopped=stopped or "finished",
    )
    proof = RecipeProof() if stopped else (yield from _climb_and_confirm(state))
    yield from _time_packed(state, task.stored_sample)
    state.say(words("trying.stages"))
    stages = yield from measure_stages(
        Measured(
            history=history,
            baseline=baseline,
            floor=floor,
            recipe=state.recipe,
            rows=tuple(state.rows),
            final=proof.final,
            confirmation=proof.confirmation,
            left_s=lambda: _left_for_stages_s(task, state),
        )
    )
    return Tuned(state=state, baseline=baseline, proof=proof, stages=stages)


def _left_for_stages_s(task: TuningTask, state: TuningState) -> float:
    """Return the time to measure stages; none once the user or a busy machine ended the tuning."""
    is_ended = state.stopped in ("interrupted", "machine busy")
    return -math.inf if is_ended else task.budget_s - state.budget.elapsed_s


def _baseline(history: TrialHistory, search: Search, ranks: int, tell: Tell) -> Asking[Baseline]:
    """Time the unchanged script; where it does not run, make it run if something is known to help.

    A training that one device is too small for is spread over those that the user has.

    Raises:
        BaselineFailedError: if it gives no measurement.
        UserError: if it runs out of memory with every technique, too.
    """
    tell(progress(history.budget, words("trying.unchanged"), event=words("trying.measuring")))
    first = yield from history.time(Recipe())
    found = None
    if first.outcome is Outcome.OOM and ranks > 1:
        found = yield from make_it_fit(history, search, first, ranks, tell)
    if found is None:
        rescue = make_it_run if first.outcome is Outcome.OOM else retry_with_fewer_workers
        found = yield from rescue(history, search, first, tell)
    if found.trial.outcome is not Outcome.OK or found.trial.profile is None:
        raise BaselineFailedError(found.trial)
    if ranks == 1 or found.recipe.num_ranks > 1:
        return found
    return (yield from find_way(history, search, found, ranks, tell))


def _look(
    history: TrialHistory, search: Search, floor: Recipe, first: Trial, tell: Tell
) -> Asking[Looks]:
    """Look at what the timed steps of the unchanged script do not show."""
    assert first.profile is not None
    tell(progress(history.budget, words("trying.closer")))
    looks = yield from look_closer(history, search, floor, first, history.budget.left_s)
    if not is_about_data(search) or history.budget.left_s <= 0:
        return looks
    tell(progress(history.budget, words("trying.samples")))
    seen = yield from look(history, floor, first.profile)
    return replace(looks, pipeline=seen.pipeline)


def _time_packed(state: TuningState, sample: StoredSample | None) -> Asking[None]:
    """Note what packing all of the data would bring on top of the recipe, where that is asked."""
    if sample is None or state.stopped not in ("finished", "budget", "busy budget"):
        return
    if sample.choice.technique in state.recipe.names:
        return
    state.say(words("trying.packed_sample"))
    try:
        note = yield from time_stored_sample(
            state.history, state.recipe, sample, lambda _: state.budget.left_s > 0
        )
    except ENDS as end:
        state.stopped = stop_of(end)
    else:
        state.notes.append(note)


def _climb_and_confirm(state: TuningState) -> Asking[RecipeProof]:
    try:
        yield from climb(state)
        note_beyond(state)
        yield from _drop_one(state)
        return (yield from _confirm(state))
    except ENDS as end:
        state.stopped = stop_of(end)
    return RecipeProof()


def _drop_one(state: TuningState) -> Asking[None]:
    """Leave each kept technique out of the final recipe: the early ones may no longer pay.

    The one that was kept last needs no such trial, unless it came in together with others, as all
    do that a screen proposed.
    """
    kept = [row for row in state.rows if row.verdict is Verdict.KEPT]
    last = kept[-1].choice if kept and _came_in_alone(kept[-1]) else None
    # Passengers first: nothing was proven of them.
    for choice in sorted(state.recipe.choices, key=lambda x: x.technique not in state.passengers):
        # To leave out the only one is what the confirmation does.
        is_only = len(state.recipe.choices) < 2 + len(state.floor.choices)
        if choice in state.floor.choices or choice == last or is_only:
            continue
        row = next(row for row in reversed(state.rows) if row.choice == choice)
        if not state.has_time() or _is_sure(row):
            continue
        state.say(words("trying.without", technique=choice.technique))
        without = state.recipe.without(choice.technique)
        match = yield from play(
            state.history,
            without,
            state.recipe,
            may_go_on=lambda _: state.budget.left_s > state.reserve_s,
            rule=Rule(max_pairs=DROP_PAIRS, min_pairs_to_drop=DROP_AFTER),
        )
        yield from _judge_drop(state, row, match, without)


def _came_in_alone(row: Row) -> bool:
    pair = row.comparison
    return not row.together_with and (pair is None or pair.source == "pairs")


def _is_sure(row: Row) -> bool:
    """Return whether a screen has left the technique out already, and seen what it does."""
    pair = row.comparison
    return pair is not None and pair.source == "screen" and pair.interval[0] > 1


def _judge_drop(state: TuningState, row: Row, match: Match, without: Recipe) -> Asking[None]:
    verdict, why = verdict_of(match, LossCheck(status="same"))
    state.rows.append(
        replace(
            row,
            stage="drop",
            verdict=verdict,
            on_top_of=without.names,
            together_with=(),
            comparison=match.comparison,
            loss_check=LossCheck(status="skipped"),
            predicted_ratio=None,
            bound_ratio=None,
            startup_s=0.0,
            break_even_steps=None,
            why=why,
        ).seen(match.candidate)
    )
    if match.decision not in (Decision.NO_EFFECT, Decision.WORSE):
        return
    check = yield from state.history.check(without)
    if match.base is None or not check.passed:
        return
    state.recipe, state.profile, state.race = without, match.base, None
    state.say("", event=words("trying.left_out", technique=row.choice.label))


def _confirm(state: TuningState) -> Asking[RecipeProof]:
    """Play the whole recipe against the baseline; a recipe that does not hold is given up."""
    if state.recipe == state.baseline:
        return RecipeProof()
    state.say(words("trying.whole"))
    match = yield from _confirmed(state)
    if match.disturbed and match.decision is Decision.UNDECIDED:
        # What was found stays, and says that it was not confirmed.
        is_busy = code_of(match.disturbed) == BUSY
        state.stopped = "machine busy" if is_busy else "baseline failed"
        return RecipeProof()
    # It has passed when it was kept: nothing is run for that.
    check = yield from state.history.check(state.recipe)
    if match.decision is Decision.KEPT and check.passed:
        notes = match.candidate.notes if match.candidate else ()
        state.notes += [note for note in notes if code_of(note) == TECHNIQUE_NOTE]
        feeding = yield from _fed(state, match.candidate)
        return RecipeProof(
            confirmation=match.comparison, final=match.candidate, check=check, feeding=feeding
        )
    why = verdict_of(match, check)[1] or named("decision", match.decision.value)
    state.notes.append(words("tune_note.not_confirmed", recipe=state.recipe.label, why=why))
    state.recipe = state.baseline
    if match.failure is not None:
        state.stopped = "recipe failed"
    elif state.stopped == "finished" and check.passed and _is_cut_short(match):
        state.stopped = "budget"
    return RecipeProof(confirmation=match.comparison, check=check)


def _is_cut_short(match: Match) -> bool:
    """Return whether the rule would have gone on with the confirming pairs, had there been time."""
    pair = match.comparison
    is_open = match.decision is Decision.UNDECIDED
    return is_open and pair is not None and pair.n < Rule().max_pairs


def _has_overdraft(state: TuningState) -> bool:
    return state.budget.left_s > -OVERDRAFT * state.budget.total_s


def _confirmed(state: TuningState) -> Asking[Match]:
    """Play the confirming pairs, or what is missing of them where a screen's recipe raced already.

    The first are played in any case. One disturbed trial among so few leaves the best recipe
    undecided: where it promises a gain all the same, as many pairs again are played, a little
    beyond the budget if need be.
    """
    race = state.race
    if race and race.comparison and race.comparison.n >= state.confirm_pairs:
        return race
    compared = functools.partial(play, state.history, state.baseline, state.recipe)
    rule = Rule(at_least=state.confirm_pairs, patience=Rule().max_pairs)
    sides = race.sides if race else None
    match = yield from compared(may_go_on=lambda _: state.budget.left_s > 0, rule=rule, sides=sides)
    if not match.is_cut_short(rule) or match.comparison is None:
        return match
    most = min(rule.max_pairs, 2 * max(state.confirm_pairs, match.comparison.n))
    rule, sides = replace(rule, max_pairs=most), match.sides
    return (yield from compared(may_go_on=lambda _: _has_overdraft(state), rule=rule, sides=sides))


def _fed(state: TuningState, final: Profile | None) -> Asking[Feeding | None]:
    """Look how well the confirmed recipe is fed, as far as there is time."""
    if final is None or state.looks.pipeline is None or not _has_overdraft(state):
        return None
    state.say(words("trying.fed"))
    try:
        return (yield from find_feeding(state.history, state.recipe, final))
    except ENDS as end:
        state.stopped = stop_of(end)
    return None  # the proof stays
