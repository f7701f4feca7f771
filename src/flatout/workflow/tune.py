"""The verb `tune`: try levers one at a time, keep what measurably helps, prove it.

The ladder: rank by predicted gain, try the best on top of the recipe so far, keep it or not, go
on. Then leave each kept lever out once more, and confirm the whole recipe against the baseline in
fresh pairs: winners of many looks are biased upwards.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.core.ablation import Ablation, Comparison, LossCheck, Row, Verdict
from flatout.core.errors import UserError
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.progress import Progress
from flatout.core.recipe import Recipe
from flatout.core.stats import Decision, Rule
from flatout.core.technique import Numerics
from flatout.core.trial import Outcome, Trial
from flatout.core.workload import Workload
from flatout.hardware.machine import read_machine
from flatout.seams.process import mend_leftovers, scratch_root
from flatout.workflow.lab import Budget, Lab, MachineBusyError, Runner, open_journal
from flatout.workflow.pairs import Match, play
from flatout.workflow.ranking import Candidate, Search, find_companion, rank
from flatout.workflow.referee import Referee
from flatout.workflow.trials import run_trial
from flatout.workflow.verdicts import event_of, row_of, verdict_of

Tell = Callable[[Progress], None]
CONFIRM_PAIRS = 3
"""Fresh pairs of the whole recipe against the baseline, at least."""
DROP_PAIRS = 4
"""Pairs at most to show that a kept lever still pays; undecided leaves it in."""
FIRST_PAIRS = 2
"""Pairs after which a lever's own profile is asked what else it needs."""
TYPICAL_PAIRS = 3
"""Pairs that a candidate takes when it is clearly better or clearly not."""


class BaselineFailedError(UserError):
    """The script does not run by itself; its trial says why."""

    def __init__(self, trial: Trial) -> None:
        super().__init__(f"the unchanged script did not give a measurement: {trial.message}")
        self.trial = trial


@dataclass(frozen=True, slots=True, kw_only=True)
class TuneOptions:
    """What a tuning may do."""

    out: Path
    """Folder for the journal and the guard's records; the reports go there too."""
    budget_s: float = 600.0
    numerics: Numerics = Numerics.PRECISION
    """Ceiling of the promises: no lever above it is tried."""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    resume: bool = False
    accepts_load: bool = False
    """Go on where other work keeps the machine busy; the report says so."""
    confirm_pairs: int = CONFIRM_PAIRS
    runner: Runner = run_trial


@dataclass(slots=True)
class _Ladder:
    """The state of one tuning."""

    workload: Workload
    options: TuneOptions
    machine: Machine
    lab: Lab
    budget: Budget
    tell: Tell
    baseline: Profile
    referee: Referee
    search: Search
    recipe: Recipe
    profile: Profile
    rows: list[Row] = field(default_factory=list)
    settled: set[str] = field(default_factory=set)
    """Techniques that came in together: another setting of one would undo the other."""
    best_ratio: float = 1.0
    confirmation: Comparison | None = None
    final: Profile | None = None
    final_check: LossCheck | None = None
    notes: list[str] = field(default_factory=list)
    stopped: str = "finished"


def tune(
    workload: Workload, options: TuneOptions, tell: Tell, machine: Machine | None = None
) -> Ablation:
    """Tune a workload and return the evidence; an empty recipe is a proper result.

    Ctrl-C ends with the table so far.

    Raises:
        BaselineFailedError: if the unchanged script gives no measurement.
        UserError: if the out folder cannot be used.
    """
    mend_leftovers()
    machine = machine or read_machine(torch=False)
    budget = Budget(total_s=options.budget_s)
    header = {"workload": workload.command_line, "torch": machine.torch_version}
    recorded = open_journal(options.out, header, resume=options.resume)
    cache = scratch_root() / "compiled" / workload.name
    cache.mkdir(parents=True, exist_ok=True)
    lab = Lab(
        workload=workload,
        machine=machine,
        out=options.out,
        limit_s=max(120.0, options.budget_s),
        cache=cache,
        accepts_load=options.accepts_load,
        may_repeat=lambda: budget.left_s > 0,
        runner=options.runner,
        recorded=recorded,
    )
    _say(tell, budget, "the unchanged script", event="measuring the unchanged script")
    first = lab.time(Recipe())
    if first.outcome is not Outcome.OK or first.profile is None:
        raise BaselineFailedError(first)
    ladder = _Ladder(
        workload=workload,
        options=options,
        machine=machine,
        lab=lab,
        budget=budget,
        tell=tell,
        baseline=first.profile,
        referee=Referee(lab, lambda text: _say(tell, budget, text)),
        search=Search(
            machine=machine, ceiling=options.numerics, only=options.only, skip=options.skip
        ),
        recipe=Recipe(training_loaders=_training_loaders(first.profile)),
        profile=first.profile,
    )
    return _climb_and_confirm(ladder)


def _climb_and_confirm(ladder: _Ladder) -> Ablation:
    try:
        _climb(ladder)
        _drop_one(ladder)
        _confirm(ladder)
    except KeyboardInterrupt:
        ladder.stopped = "interrupted"
    except MachineBusyError:
        ladder.stopped = "machine busy"
    return _ablation(ladder)


def _climb(ladder: _Ladder) -> None:
    """Try one lever after the other on top of the recipe so far."""
    tried: set[str] = set()
    while True:
        candidate = _next_candidate(ladder, tried)
        if candidate is None:
            return
        tried.add(candidate.choice.label)
        if ladder.budget.left_s < _cost_s(ladder) + _reserve_s(ladder):
            ladder.stopped = "budget"
            ladder.notes.append(
                f"not tried for lack of time: {candidate.choice.label} "
                f"(predicted {candidate.ratio:.2f}x)"
            )
            return
        _try(ladder, candidate)


def _next_candidate(ladder: _Ladder, tried: set[str]) -> Candidate | None:
    for candidate in rank(ladder.profile, ladder.search):
        choice = candidate.choice
        is_new = choice.label not in tried and choice.technique not in ladder.settled
        if is_new and candidate.is_worth_a_trial:
            return candidate
        if is_new:
            note = f"not tried: {choice.label}, predicted {candidate.ratio:.2f}x at most"
            if note not in ladder.notes:
                ladder.notes.append(note)
    return None


def _try(ladder: _Ladder, candidate: Candidate) -> None:
    """Play one candidate against the recipe so far; keep it if it is faster and proven right.

    A lever that is not clearly faster in the first pairs may have made another one worth trying:
    workers pay only where threads leave them a core. Then both are played together.
    """
    choice = candidate.choice
    _say(ladder.tell, ladder.budget, choice.label, ladder.best_ratio)
    recipe = ladder.recipe.plus(choice)
    match = _play(ladder, recipe, Rule(max_pairs=FIRST_PAIRS))
    companion = None
    if match.decision is not Decision.KEPT and match.candidate is not None:
        companion = find_companion(ladder.profile, match.candidate, candidate, ladder.search)
    if companion is None and match.decision is Decision.UNDECIDED and match.failure is None:
        match = _play(ladder, recipe, Rule(), earlier=match)
    _settle(ladder, candidate, recipe, match)
    if companion is not None and ladder.budget.left_s > _cost_s(ladder) + _reserve_s(ladder):
        both = recipe.plus(companion.choice)
        _say(ladder.tell, ladder.budget, both.label, ladder.best_ratio)
        together = _play(ladder, both, Rule())
        _settle(ladder, companion, both, together, together_with=(choice.technique,))


def _play(ladder: _Ladder, recipe: Recipe, rule: Rule, *, earlier: Match | None = None) -> Match:
    """Play a recipe against the one so far while there is time beyond the confirmation's."""
    return play(
        ladder.lab,
        ladder.recipe,
        recipe,
        may_go_on=lambda: ladder.budget.left_s > _reserve_s(ladder),
        rule=rule,
        earlier=earlier,
    )


def _settle(
    ladder: _Ladder,
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
    _say(ladder.tell, ladder.budget, "", ladder.best_ratio, event=event_of(row))
    return row


def _drop_one(ladder: _Ladder) -> None:
    """Leave each kept lever out of the final recipe: the early ones may no longer pay."""
    for row in [r for r in ladder.rows if r.verdict is Verdict.KEPT][:-1]:
        name = row.choice.technique
        if row.choice not in ladder.recipe.choices or ladder.budget.left_s < (
            _cost_s(ladder) + _reserve_s(ladder)
        ):
            continue
        _say(ladder.tell, ladder.budget, f"without {name}", ladder.best_ratio)
        without = ladder.recipe.without(name)
        match = play(
            ladder.lab,
            without,
            ladder.recipe,
            may_go_on=lambda: ladder.budget.left_s > _reserve_s(ladder),
            rule=Rule(max_pairs=DROP_PAIRS),
        )
        _judge_drop(ladder, row, match, without)


def _judge_drop(ladder: _Ladder, row: Row, match: Match, without: Recipe) -> None:
    verdict, why = verdict_of(match, LossCheck(status="same"))
    ladder.rows.append(
        replace(
            row,
            stage="drop",
            verdict=verdict,
            on_top_of=without.names,
            comparison=match.comparison,
            loss_check=LossCheck(status="skipped"),
            predicted_ratio=None,
            startup_s=0.0,
            break_even_steps=None,
            why=why,
        )
    )
    if match.decision not in (Decision.NO_EFFECT, Decision.WORSE):
        return
    if match.base is None or not ladder.referee.check(without).passed:
        return
    ladder.recipe, ladder.profile = without, match.base
    _say(
        ladder.tell,
        ladder.budget,
        "",
        ladder.best_ratio,
        event=f"{row.choice.label}: no longer pays, left out",
    )


def _confirm(ladder: _Ladder) -> None:
    """Play the whole recipe against the baseline; a recipe that does not hold is given up."""
    if not ladder.recipe.choices:
        return
    _say(ladder.tell, ladder.budget, "the whole recipe against the baseline", ladder.best_ratio)
    baseline = Recipe(training_loaders=ladder.recipe.training_loaders)
    match = play(
        ladder.lab,
        baseline,
        ladder.recipe,
        may_go_on=lambda: ladder.budget.left_s > 0,
        rule=Rule(at_least=ladder.options.confirm_pairs, patience=Rule().max_pairs),
    )
    ladder.confirmation, ladder.final = match.comparison, match.candidate
    ladder.final_check = ladder.referee.check(ladder.recipe)
    holds = match.decision is Decision.KEPT and ladder.final_check.passed
    if not holds:
        ladder.notes.append(
            f"the recipe ({ladder.recipe.label}) was not confirmed: "
            f"{verdict_of(match, ladder.final_check)[1] or match.decision.value}"
        )
        ladder.recipe = baseline


def _ablation(ladder: _Ladder) -> Ablation:
    pairs = [row.comparison for row in ladder.rows if row.comparison]
    if ladder.confirmation:
        pairs.append(ladder.confirmation)
    recipe = ladder.recipe
    about: dict[str, Any] = {
        "script": ladder.workload.command_line,
        "torch": ladder.machine.torch_version,
        "device": ladder.baseline.device_name,
    }
    if ladder.confirmation:
        about["ratio"] = round(ladder.confirmation.ratio, 3)
    if ladder.lab.disturbed:
        ladder.notes.append(
            f"{ladder.lab.disturbed} of {ladder.lab.timed} trials were disturbed by other work "
            + ("and some of them count" if ladder.options.accepts_load else "and were repeated")
        )
    return Ablation(
        workload=ladder.workload.command_line,
        baseline=ladder.baseline,
        rows=tuple(ladder.rows),
        recipe=replace(recipe, about=about) if recipe.choices else recipe,
        confirmation=ladder.confirmation,
        final=ladder.final,
        final_check=ladder.final_check,
        aa_check=ladder.referee.aa_check,
        resolution=max((pair.resolution for pair in pairs), default=1.0),
        cost_s=ladder.budget.elapsed_s + ladder.lab.replayed_s,
        stopped=ladder.stopped,
        notes=tuple(ladder.notes),
    )


def _training_loaders(profile: Profile) -> tuple[str, ...]:
    return tuple(loader.address for loader in profile.training_loaders)


def _cost_s(ladder: _Ladder) -> float:
    """Return what trying one more candidate typically takes."""
    one = ladder.lab.cost_s(ladder.recipe, default=10.0)
    return 2 * TYPICAL_PAIRS * one


def _reserve_s(ladder: _Ladder) -> float:
    """Return the time to keep for the confirmation; nothing to confirm needs none."""
    if not ladder.recipe.choices:
        return 0.0
    one = ladder.lab.cost_s(ladder.recipe, default=10.0)
    base = ladder.lab.cost_s(Recipe(training_loaders=ladder.recipe.training_loaders), default=one)
    return ladder.options.confirm_pairs * (one + base)


def _say(
    tell: Tell, budget: Budget, trying: str, best_ratio: float = 1.0, *, event: str = ""
) -> None:
    tell(
        Progress(
            trying=trying,
            done_share=min(1.0, budget.elapsed_s / budget.total_s),
            elapsed_s=budget.elapsed_s,
            left_s=max(0.0, budget.left_s),
            best_ratio=best_ratio,
            event=event,
        )
    )
