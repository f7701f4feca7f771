"""The command `tune`: try techniques, keep what measurably helps, prove it.

First what can be switched while the script trains is screened in one process. Then the ladder: rank
by predicted gain, try the best on top of the recipe so far, keep it or not, go on; what was seen to
help together goes first as one, with too little time for each the techniques on the computation,
too. Then leave each kept technique out once more, where the screen did not, and confirm the whole
recipe against the baseline in fresh pairs: winners of many looks are biased upwards.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.hardware.machine import read_machine
from flatout.launch.folder_lock import FolderBusyError, hold_folder
from flatout.launch.trial_process import clean_up_stale_trials, scratch_root
from flatout.records.ablation import (
    Ablation,
    Comparison,
    Feeding,
    LossCheck,
    Row,
    StagedRow,
    Verdict,
)
from flatout.records.errors import UserError
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Decision, Rule
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.bundle import drop_order
from flatout.tuning.extra_profiling import Looks, look_closer
from flatout.tuning.feeding import find_feeding, is_about_data, look, note_prepared
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.history import append_results, errors_on, read_history
from flatout.tuning.ladder import climb
from flatout.tuning.pairs import Match, play, verdict_of
from flatout.tuning.ranking import Search
from flatout.tuning.rescue import RescuedBaseline, make_it_run, retry_with_fewer_workers
from flatout.tuning.script_files import digests_of
from flatout.tuning.staged import TIME_SHARE, Measured, length_of, measure_stages
from flatout.tuning.state import Tell, TuningState, progress
from flatout.tuning.trial_runner import (
    JOURNAL,
    Budget,
    MachineBusyError,
    Runner,
    TrialRunner,
    key_of,
    make_out,
    open_journal,
    wait_for_quiet,
)
from flatout.tuning.trials import run_trial
from flatout.tuning.worker_scan import WorkerScans

RECORDS = 3
"""Version of what a journal holds alongside the trials' own schema: those of another are not read.
"""
WARM = (
    "an earlier tuning of this script left a compile cache: without it, techniques that "
    "compile may "
    "need longer at the start than is said here"
)
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
class TuneOptions:
    """What a tuning may do."""

    out: Path
    """Folder for the journal and the guard's records; the reports go there too."""
    budget_s: float = 600.0
    numerics: Numerics = Numerics.PRECISION
    """Ceiling of the promises: no technique above it is tried."""
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    resume: bool = False
    accepts_load: bool = False
    """Go on where other work keeps the machine busy; the report says so."""
    confirm_pairs: int = CONFIRM_PAIRS
    history: Path | None = None
    """File of what earlier tunings on this machine found; None neither reads nor writes one."""
    runner: Runner = run_trial
    clock: Callable[[], float] = time.monotonic
    """Tells the seconds that the budget counts."""
    wait: Callable[[float], None] = wait_for_quiet
    """Waits for other processes to leave the cores alone, for so many seconds at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Proof:
    """The whole recipe against the baseline."""

    confirmation: Comparison | None = None
    final: Profile | None = None
    check: LossCheck | None = None
    feeding: Feeding | None = None


def tune(
    workload: Workload, options: TuneOptions, tell: Tell, machine: Machine | None = None
) -> Ablation:
    """Tune a workload and return the evidence; an empty recipe is a proper result.

    Ctrl-C ends with the table so far.

    Raises:
        BaselineFailedError: if the unchanged script gives no measurement.
        UserError: if the out folder cannot be used, or another tuning writes there.
    """
    clean_up_stale_trials()
    machine = machine or read_machine(torch=False)
    with _held(options):
        budget = Budget(total_s=(1 - TIME_SHARE) * options.budget_s, clock=options.clock)
        begun, recorded = open_journal(
            options.out, _header(workload, machine, options.history), resume=options.resume
        )
        cache = scratch_root() / "compiled" / workload.name
        cache.mkdir(parents=True, exist_ok=True)
        lab = TrialRunner(
            workload=workload,
            machine=machine,
            out=options.out,
            limit_s=max(120.0, options.budget_s),
            cache=cache,
            was_compiled=any(cache.iterdir()),
            accepts_load=options.accepts_load,
            may_repeat=lambda: budget.left_s > 0,
            wait=options.wait,
            runner=options.runner,
            recorded=recorded,
        )
        tell(progress(budget, "the unchanged script", event="measuring the unchanged script"))
        first = lab.time(Recipe())
        search = Search(
            machine=machine, ceiling=options.numerics, only=options.only, skip=options.skip
        )
        rescue = _rescue(lab, search, first, budget, tell)
        if rescue is not None:
            first = rescue.trial or rescue.first
        if first.outcome is not Outcome.OK or first.profile is None:
            raise BaselineFailedError(first)
        floor = rescue.recipe if rescue else Recipe()
        floor = replace(floor, training_loaders=_training_loaders(first.profile))
        looks = _look(lab, search, floor, first, budget, tell)
        looked = looks.added_to(first.profile, floor.names, floor.names)
        ladder = TuningState(
            lab=lab,
            budget=budget,
            tell=tell,
            referee=GuardChecker(
                lab,
                lambda text: tell(progress(budget, text)),
                floor=floor,
                ceiling=options.numerics,
            ),
            search=search,
            confirm_pairs=options.confirm_pairs,
            recipe=floor,
            floor=floor,
            profile=looked,
            scans=WorkerScans(lab=lab, search=search),
            looks=looks,
            earlier=begun.get("earlier", {}),
            rows=list(rescue.rows()) if rescue else [],
            settled={choice.technique for choice in floor.choices},
            notes=rescue.notes() if rescue else [],
        )
        proof = _climb_and_confirm(ladder)
        stages = _stages(ladder, looked, proof, options.budget_s)
        ablation = replace(
            _ablation(ladder, looked, proof), stages=stages, training=length_of(workload, looked)
        )
        if options.history is not None:
            append_results(options.history, ablation, workload.name, _device_of(machine))
        return ablation


@contextlib.contextmanager
def _held(options: TuneOptions) -> Iterator[None]:
    """Keep other tunings out of the out folder; leave none behind where nothing was measured."""
    out = options.out
    missing = [path for path in (out, *out.parents) if not path.exists()]
    make_out(out)
    try:
        with hold_folder(out, scratch_root()):
            yield
    except UserError as error:
        if isinstance(error, BaselineFailedError) and not options.resume:
            (out / JOURNAL).unlink(missing_ok=True)
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()  # unless it holds trials
        raise
    except FolderBusyError:
        raise UserError(
            f"another tuning writes to {out}: wait for its end, or choose another --out"
        ) from None


def _device_of(machine: Machine) -> str:
    """Return what a tuning's findings hold for."""
    devices = machine.devices or (machine.device,)
    return ", ".join(device.name for device in devices)


def _header(workload: Workload, machine: Machine, history: Path | None) -> dict[str, Any]:
    """Return what a journal's trials belong to, and what is known at the beginning.

    The trials are not compared with those of anything else. A resumed tuning orders by what was
    known when it began, or it would ask for other trials than those that it recorded.
    """
    device = _device_of(machine)
    earlier = read_history(history) if history is not None else []
    return {
        "earlier": errors_on(device, earlier),
        "records": RECORDS,
        "workload": workload.command_line,
        "torch": machine.torch_version,
        "device": device,
        "cpu": machine.cpu_name,
        "cores": machine.usable_cores,
        "files": digests_of(workload),
    }


def _look(
    lab: TrialRunner, search: Search, floor: Recipe, first: Trial, budget: Budget, tell: Tell
) -> Looks:
    """Look at what the timed steps of the unchanged script do not show."""
    assert first.profile is not None
    tell(progress(budget, "a closer look at the unchanged script"))
    looks = look_closer(lab, search, floor, first, budget.left_s)
    if not is_about_data(search) or budget.left_s <= 0:
        return looks
    tell(progress(budget, "the samples of the unchanged script"))
    return replace(looks, pipeline=look(lab, floor, first.profile).pipeline)


def _rescue(
    lab: TrialRunner, search: Search, first: Trial, budget: Budget, tell: Tell
) -> RescuedBaseline | None:
    """Make a script run that does not on its own; None where it does, or nothing is known to help.

    Raises:
        UserError: if it runs out of memory with every technique, too.
    """
    if first.outcome is Outcome.OOM:
        return make_it_run(lab, search, first, budget, tell)
    return retry_with_fewer_workers(lab, search, first, budget, tell)


def _climb_and_confirm(ladder: TuningState) -> _Proof:
    try:
        climb(ladder)
        _drop_one(ladder)
        return _confirm(ladder)
    except KeyboardInterrupt:
        ladder.stopped = "interrupted"
    except MachineBusyError:
        ladder.stopped = "machine busy"
    return _Proof()


def _drop_one(ladder: TuningState) -> None:
    """Leave each kept technique out of the final recipe: the early ones may no longer pay.

    The one that was kept last needs no such trial, unless it came in together with others.
    """
    kept = [row for row in ladder.rows if row.verdict is Verdict.KEPT]
    last = kept[-1].choice if kept and not kept[-1].together_with else None
    for choice in drop_order(ladder):
        if choice in ladder.floor.choices:
            continue
        if len(ladder.recipe.choices) < 2 or choice == last or not ladder.has_time():
            continue
        if _is_sure(_row_about(ladder, choice)):
            continue
        ladder.say(f"without {choice.technique}")
        without = ladder.recipe.without(choice.technique)
        match = play(
            ladder.lab,
            without,
            ladder.recipe,
            may_go_on=lambda: ladder.budget.left_s > ladder.reserve_s,
            rule=Rule(max_pairs=DROP_PAIRS, min_pairs_to_drop=DROP_AFTER),
        )
        _judge_drop(ladder, _row_about(ladder, choice), match, without)


def _is_sure(row: Row) -> bool:
    """Return whether a screen has left the technique out already, and seen what it does."""
    pair = row.comparison
    return pair is not None and pair.source == "screen" and pair.interval[0] > 1


def _row_about(ladder: TuningState, choice: Choice) -> Row:
    """Return the last row on a technique.

    Where it came in with others, its own is the earlier one.
    """
    return next(row for row in reversed(ladder.rows) if row.choice == choice)


def _judge_drop(ladder: TuningState, row: Row, match: Match, without: Recipe) -> None:
    verdict, why = verdict_of(match, LossCheck(status="same"))
    ladder.rows.append(
        replace(
            row,
            stage="drop",
            verdict=verdict,
            on_top_of=without.names,
            together_with=(),
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
    ladder.recipe, ladder.profile, ladder.race = without, match.base, None
    ladder.say("", event=f"{row.choice.label}: no longer pays, left out")


def _confirm(ladder: TuningState) -> _Proof:
    """Play the whole recipe against the baseline; a recipe that does not hold is given up."""
    if ladder.recipe == ladder.baseline:
        return _Proof()
    ladder.say("the whole recipe against the baseline")
    match = _confirmed(ladder)
    if match.disturbed and match.decision is Decision.UNDECIDED:
        raise MachineBusyError  # what was found stays, and says that it was not confirmed
    check = ladder.referee.check(ladder.recipe)
    if match.decision is Decision.KEPT and not check.passed and _without_guilty(ladder, check):
        return _confirm(ladder)
    if match.decision is not Decision.KEPT or not check.passed:
        ladder.notes.append(
            f"the recipe ({ladder.recipe.label}) was not confirmed: "
            f"{verdict_of(match, check)[1] or match.decision.value}"
        )
        ladder.recipe = ladder.baseline
    return _Proof(
        confirmation=match.comparison,
        final=match.candidate,
        check=check,
        feeding=_fed(ladder, match.candidate),
    )


def _without_guilty(ladder: TuningState, check: LossCheck) -> bool:
    """Take what the guard rejects out of the final recipe; say whether that leaves anything."""
    guilty = ladder.referee.find_guilty(ladder.baseline, ladder.recipe, lambda: True)
    rest = ladder.recipe
    for choice in guilty:
        rest = rest.without(choice.technique)
    if not guilty or rest == ladder.baseline:
        return False
    names = ", ".join(choice.technique for choice in guilty)
    ladder.notes.append(f"the guard rejects the whole recipe for {names}: {check.why}")
    ladder.recipe, ladder.race = rest, None
    return True


def _confirmed(ladder: TuningState) -> Match:
    """Play the confirming pairs, or what is missing of them where a screen's recipe raced already.

    The first are played in any case, beyond the budget only those that all that was found depends
    on. One disturbed trial among so few leaves the best recipe
    undecided: where it promises a gain all the same, as many pairs again are played.
    """
    rule = Rule(at_least=ladder.confirm_pairs, patience=Rule().max_pairs)
    lab, base, recipe = ladder.lab, ladder.baseline, ladder.recipe
    race = ladder.race
    if race and race.comparison and race.comparison.n >= ladder.confirm_pairs:
        return race
    match = play(
        lab, base, recipe, may_go_on=lambda: ladder.budget.left_s > 0, rule=rule, earlier=race
    )
    is_open = match.ran_out and match.decision is Decision.UNDECIDED
    if not is_open or match.comparison is None or match.comparison.ratio < rule.promising:
        return match
    most = min(rule.max_pairs, 2 * max(ladder.confirm_pairs, match.comparison.n))
    more = replace(rule, max_pairs=most)
    return play(lab, base, recipe, may_go_on=lambda: True, rule=more, earlier=match)


def _fed(ladder: TuningState, final: Profile | None) -> Feeding | None:
    """Look how well the confirmed recipe is fed, where the unchanged script was not."""
    if final is None or ladder.looks.pipeline is None or ladder.recipe == ladder.baseline:
        return None
    ladder.say("how well the recipe is fed")
    return find_feeding(ladder.lab, ladder.recipe, final)


def _stages(
    ladder: TuningState, baseline: Profile, proof: _Proof, budget_s: float
) -> tuple[StagedRow, ...]:
    """Measure the recipe as it grows, with the time that is left."""
    ladder.say("the recipe, technique by technique")
    return measure_stages(
        Measured(
            lab=ladder.lab,
            baseline=baseline,
            floor=ladder.floor,
            recipe=ladder.recipe,
            rows=tuple(ladder.rows),
            final=proof.final if proof.confirmation else None,
            left_s=lambda: budget_s - ladder.budget.elapsed_s,
        )
    )


def _ablation(ladder: TuningState, baseline: Profile, proof: _Proof) -> Ablation:
    lab = ladder.lab
    pairs = [x for row in ladder.rows if (x := row.comparison) and x.source == "pairs"]
    if proof.confirmation:
        pairs.append(proof.confirmation)
    recipe = ladder.recipe
    about: dict[str, Any] = {
        "script": lab.workload.command_line,
        "torch": lab.machine.torch_version,
        "device": baseline.device_name,
    }
    if proof.confirmation:
        about["ratio"] = round(proof.confirmation.ratio, 3)
    final = proof.final and _with_processes(proof.final, ladder.recipe, lab)
    if is_about_data(ladder.search) and ladder.stopped != "interrupted":
        now = ladder.looked(proof.final or ladder.profile, recipe)
        ladder.notes += note_prepared(recipe, now, lab.machine)
    if lab.was_compiled and any(row.startup_s for row in ladder.rows):
        ladder.notes.append(WARM)
    if lab.disturbed:
        ladder.notes.append(
            f"{lab.disturbed} of {lab.timed} trials were disturbed by other work "
            + (
                "and count where both sides saw the same load"
                if lab.accepts_load
                else "and do not count"
            )
        )
    return Ablation(
        workload=lab.workload.command_line,
        baseline=_with_processes(baseline, ladder.baseline, lab),
        rows=tuple(ladder.rows),
        recipe=replace(recipe, about=about) if recipe.choices else recipe,
        needed=tuple(choice.label for choice in ladder.floor.choices),
        confirmation=proof.confirmation,
        final=final,
        final_check=proof.check,
        feeding=proof.feeding,
        aa_check=ladder.referee.aa_check,
        resolution=max((pair.resolution for pair in pairs), default=1.0),
        foreign_shares=tuple(lab.foreign_shares),
        cost_s=ladder.budget.elapsed_s + lab.replayed_s,
        stopped=ladder.stopped,
        notes=tuple(ladder.notes),
    )


def _with_processes(profile: Profile, recipe: Recipe, lab: TrialRunner) -> Profile:
    """Return the profile with the step of every process in which its recipe was timed."""
    steps_s = lab.step_s.get(key_of(recipe), [])
    return replace(profile, process_steps_ms=tuple(1e3 * step_s for step_s in steps_s))


def _training_loaders(profile: Profile) -> tuple[str, ...]:
    return tuple(loader.address for loader in profile.training_loaders)
