"""The command `survey`: each method of the articles on a script, alone, whether or not it helps.

Nothing is chosen and nothing is kept: each is compared with the unchanged script in interleaved
pairs of fresh processes. The guard is not asked, which the report says.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import clean_up_stale_trials, compile_cache
from flatout.records import catalogue
from flatout.records.ablation import LossCheck, Method, Survey, SurveyRow, Verdict, methods
from flatout.records.live import Tell
from flatout.records.machine import Machine
from flatout.records.messages import interval_of, times, words
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Rule
from flatout.records.trial import Outcome, Workload
from flatout.records.units import format_bytes
from flatout.techniques.memory_pressure import peak_bytes, state_bytes
from flatout.tuning.experiments import ENDS, Budget, stop_of
from flatout.tuning.guard_checker import promise_of
from flatout.tuning.pairs import Match, play, verdict_of
from flatout.tuning.policy import BaselineFailedError
from flatout.tuning.state import progress
from flatout.tuning.trial_runner import (
    Runner,
    TrialRunner,
    held_out,
    open_journal,
    wait_for_quiet,
)
from flatout.tuning.trials import run_trial
from flatout.tuning.turns import can_take_turns

PAIRS = Rule(max_pairs=3, min_pairs_to_drop=2, hopeless=0.0)
"""Two pairs show a large effect, three a smaller one: thirteen rows are wanted in ten minutes. One
alone only where the budget ends."""
ZERO_RANKS = 2
"""Devices for which the memory of ZeRO is predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SurveyOptions:
    """What a survey may do."""

    out: Path
    """Folder for the journal."""
    budget_s: float = 600.0
    accepts_load: bool = False
    runner: Runner = run_trial
    clock: Callable[[], float] = time.monotonic
    wait: Callable[[float], None] = wait_for_quiet


def survey(
    workload: Workload, options: SurveyOptions, tell: Tell, machine: Machine | None = None
) -> Survey:
    """Compare each method with the unchanged script; Ctrl-C ends with the rows so far.

    Raises:
        BaselineFailedError: if the unchanged script gives no measurement.
        UserError: if the out folder cannot be used, or another tuning writes there.
    """
    clean_up_stale_trials()
    with held_out(options.out):
        return _survey(workload, options, tell, machine or read_machine(torch=False))


def _survey(workload: Workload, options: SurveyOptions, tell: Tell, machine: Machine) -> Survey:
    budget = Budget(total_s=options.budget_s)
    open_journal(options.out, {"survey": workload.command_line}, resume=False)
    runner = TrialRunner(
        workload=workload,
        machine=machine,
        out=options.out,
        limit_s=max(120.0, options.budget_s),
        cache=compile_cache(workload),
        accepts_load=options.accepts_load,
        budget=budget,
        clock=options.clock,
        wait=options.wait,
        runner=options.runner,
    )

    def counted(trying: str, *, event: str = "") -> None:
        tell(replace(progress(budget, trying, event=event), num_runs=runner.num_runs))

    counted(words("trying.unchanged"), event=words("trying.measuring"))
    first = runner.time(Recipe())
    if first.outcome is not Outcome.OK or first.profile is None:
        raise BaselineFailedError(first)
    is_real = options.runner is run_trial  # another one runs one trial at a time
    runner.history.takes_turns = is_real and can_take_turns(first, machine)
    asked = methods()
    rows: list[SurveyRow] = []
    stopped = "finished"
    try:
        for method in asked:
            if budget.left_s <= 0 and not method.beyond:
                stopped = "budget"
                rows.append(_empty(method))
                continue
            counted(_of(method.name, len(rows) + 1, len(asked)))
            # Each of those left gets as much: one that takes long must not cost the others theirs.
            share_s = budget.left_s / (len(asked) - len(rows))
            rows.append(_row(runner, method, first.profile, budget, budget.elapsed_s + share_s))
            counted("", event=_of(_event(rows[-1]), len(rows), len(asked)))
    except ENDS as end:
        stopped = stop_of(end)
    rows += [_empty(method) for method in asked[len(rows) :]]
    return Survey(
        workload=workload.command_line,
        baseline=first.profile,
        rows=tuple(rows),
        cost_s=budget.elapsed_s,
        stopped=stopped,
    )


def _row(
    runner: TrialRunner, method: Method, profile: Profile, budget: Budget, ends_s: float
) -> SurveyRow:
    """Measure one method: the first of its recipes that can act on the script.

    No further pair begins after `ends_s` of the budget; one is played always.
    """
    empty = _empty(method)
    if method.beyond:
        return _predicted(empty, method, profile)
    loaders = tuple(loader.address for loader in profile.training_loaders)
    row = replace(empty, status="impossible", why=words("survey.nothing_offered"))
    base = Recipe(training_loaders=loaders)
    for recipe in _recipes(method, profile, runner.machine):
        candidate = replace(recipe, training_loaders=loaders)

        def may_go_on(_pairs: int, candidate: Recipe = candidate) -> bool:
            pair_s = runner.history.cost_s(base, 0.0) + runner.history.cost_s(candidate, 0.0)
            return budget.elapsed_s + pair_s < ends_s

        match = runner.drive(play(runner.history, base, candidate, may_go_on=may_go_on, rule=PAIRS))
        row = _judged(empty, candidate, match)
        if row.status != "impossible":
            break
    return row


def _recipes(method: Method, profile: Profile, machine: Machine) -> Iterator[Recipe]:
    """Yield the recipes of a method that may act on the script."""
    for parts in method.recipes:
        choices = []
        for part in parts:
            kind = catalogue.technique_class(part.technique)
            offered = kind.candidates(profile, machine)
            if part.offered and not offered:
                break
            own = (offered[0] if offered else kind()).settings()
            settings = own if part.settings is None else part.settings
            choices.append(Choice(technique=part.technique, settings=settings))
        else:
            yield Recipe(choices=tuple(choices))


def _judged(empty: SurveyRow, recipe: Recipe, match: Match) -> SurveyRow:
    row = replace(empty, recipe=recipe, numerics=promise_of(recipe).value)
    if match.failure is not None:
        verdict, why = verdict_of(match, LossCheck(status="skipped"))
        is_refused = verdict is Verdict.NOT_APPLICABLE
        return replace(row, status="impossible" if is_refused else "failed", why=why)
    if match.comparison is None or match.candidate is None or match.base is None:
        return replace(row, why=match.disturbed or words("stopped.budget"))
    peak, before = match.candidate.peak_bytes, match.base.peak_bytes
    held, held_before = (p.allocated or p.device for p in (peak, before))
    return replace(
        row,
        status="measured",
        comparison=match.comparison,
        peak_bytes=peak,
        peak_ratio=held / held_before if held and held_before else None,
    )


def _predicted(empty: SurveyRow, method: Method, profile: Profile) -> SurveyRow:
    """Return what is predicted of the memory: each device keeps its part of the optimizer's state.

    Rajbhandari et al. 2020, stage 1.
    """
    saved = state_bytes(profile) * (1 - 1 / ZERO_RANKS)
    peak = peak_bytes(profile)
    return replace(
        empty,
        status="predicted",
        peak_ratio=(peak - saved) / peak if peak else None,
        why=words(method.beyond, n=str(ZERO_RANKS), saved=format_bytes(saved)),
    )


def _empty(method: Method) -> SurveyRow:
    return SurveyRow(method=method.name, faster=method.faster, smaller=method.smaller)


def _event(row: SurveyRow) -> str:
    """Return one line about a row for the running display."""
    method, status = row.method, words(f"trying.status_{row.status}")
    if row.comparison is None:
        return words("joint.because", one=method, other=status)
    interval = interval_of(row.comparison.interval)
    ratio = times(row.comparison.ratio)
    if not row.peak_ratio:
        return words("trying.method", method=method, ratio=ratio, interval=interval)
    about = {"method": method, "ratio": ratio, "interval": interval}
    return words("trying.method_and_memory", **about, memory=times(row.peak_ratio))


def _of(what: str, number: int, count: int) -> str:
    return words("trying.row_of", what=what, n=str(number), of=str(count))
