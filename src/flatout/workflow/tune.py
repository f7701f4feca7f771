"""The command `tune`: try techniques, keep what measurably helps, prove it.

What is run next, and why, is in `flatout.tuning.policy`; this file opens the journal, runs what the
policy asks for, and makes the ablation of where it ended.
"""

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout import rules
from flatout.data.format import STORES, TIMED_SAMPLE
from flatout.hardware.machine import read_machine
from flatout.launch.trial_process import clean_up_stale_trials, compile_cache
from flatout.records import catalogue
from flatout.records.ablation import Ablation
from flatout.records.errors import UserError, unknown
from flatout.records.json_records import to_plain
from flatout.records.live import Progress, Tell
from flatout.records.machine import Machine
from flatout.records.messages import code_of, words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.statistics import Rule
from flatout.records.technique import Numerics
from flatout.records.trial import Trial, Workload
from flatout.records.units import format_duration
from flatout.rules import source
from flatout.tuning.experiments import Record, TrialHistory, key_of
from flatout.tuning.feeding import SAMPLE_TIMED, StoredSample, is_about_data, note_prepared
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.history import append_results, errors_on, read_history
from flatout.tuning.pair_hosts import PairHosts
from flatout.tuning.policy import (
    CONFIRM_PAIRS,
    BaselineFailedError,
    Tuned,
    TuningTask,
    budget_of,
    tuning,
)
from flatout.tuning.script_files import digests_of, find_script, shown
from flatout.tuning.staged import length_of
from flatout.tuning.state import progress
from flatout.tuning.trial_runner import (
    JOURNAL,
    Runner,
    TrialRunner,
    held_out,
    open_journal,
    wait_for_quiet,
)
from flatout.tuning.trials import run_trial
from flatout.workflow.check import check
from flatout.workflow.pack_for_tuning import PackCost, pack_for_tuning, packed_technique

HostFinder = Callable[
    [Workload, float, Callable[[str], None]], contextlib.AbstractContextManager[PairHosts]
]
"""Takes the workload, the time for one trial and what tells an event; gives hosts of this kind."""
RECORDS = 5
"""Version of what a journal holds alongside the trials' own schema: those of another are not read.
"""


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
    pack: str = ""
    """Data to pack first, as `flatout pack` takes them; empty for none."""
    acknowledged: tuple[str, ...] = ()
    """Codes of wrong training that do not keep it from being tuned."""
    confirm_pairs: int = CONFIRM_PAIRS
    ranks: int = 1
    """Devices to spread a script for one device over, where that is faster."""
    hosts: HostFinder | None = None
    """Finds other hosts that play pairs at the same time."""
    history: Path | None = None
    """File of what earlier tunings on this machine found; None neither reads nor writes one."""
    runner: Runner = run_trial
    clock: Callable[[], float] = time.monotonic
    """Tells the seconds that the budget counts."""
    wait: Callable[[float], None] = wait_for_quiet
    """Waits for other processes to leave the cores alone, for so many seconds at most."""

    def __post_init__(self) -> None:
        for name in (*self.only, *self.skip):
            catalogue.technique_class(name)


def tune(
    workload: Workload, options: TuneOptions, tell: Tell, machine: Machine | None = None
) -> Ablation:
    """Tune a workload and return the evidence; an empty recipe is a proper result.

    Ctrl-C ends with the table so far.

    Raises:
        BaselineFailedError: if the unchanged script gives no measurement.
        UserError: if the out folder cannot be used, another tuning writes there, or the training is
            wrong as it is and that is not acknowledged.
    """
    wrong = _wrong_places(workload, options.acknowledged)
    clean_up_stale_trials()
    machine = machine or read_machine(torch=False)
    latest = Progress(trying="", done_share=0.0, elapsed_s=0.0, left_s=options.budget_s)
    with _held(options), contextlib.ExitStack() as joined:
        options, cost = _packed(options, tell)
        hosts = joined.enter_context(
            _hosts(workload, options, lambda text: tell(replace(latest, event=text)))
        )
        task = _task_of(machine, options, 1 + len(hosts.hosts), cost.sample if cost else None)
        header = header_of(workload, machine) | {"task": to_plain(task)}
        begun, recorded = open_journal(options.out, header, resume=options.resume)
        # A resumed tuning orders by what was known when it began, or it would ask for other trials
        # than those that it recorded.
        task = _as_begun(task, begun.get("task", {}))
        runner = _runner(workload, machine, options, hosts, recorded)

        def counted(now: Progress) -> None:
            nonlocal latest
            left_s = max(options.budget_s - now.elapsed_s, 0.0)
            latest = replace(now, num_runs=runner.num_runs, left_s=left_s)
            tell(latest)

        budget = budget_of(task)
        guard = GuardChecker(
            runner, lambda text: counted(progress(budget, text)), ceiling=task.numerics
        )
        runner.judge = guard.judge
        asking = tuning(task, budget, counted)
        try:
            experiment = next(asking)
            while True:
                try:
                    record = runner.run(experiment)
                    if runner.num_runs == 1:
                        _refuse_what_ran(record.trial, machine, wrong, options.acknowledged)
                    now = replace(budget, elapsed_s=record.elapsed_s)
                    counted(progress(now, latest.trying, latest.best_ratio))
                except KeyboardInterrupt as wish:  # noqa: PERF203  an experiment takes seconds
                    experiment = asking.throw(wish)
                else:
                    experiment = asking.send(record)
        except StopIteration as end:
            tuned: Tuned = end.value
        ablation = replace(
            _ablation(tuned, runner),
            stages=tuned.stages,
            training=length_of(workload, tuned.baseline),
            notes=(*([cost.sentence] if cost else ()), *tuned.state.notes, *hosts.notes),
        )
        if options.history is not None:
            append_results(options.history, ablation, workload.name, _device_of(machine))
        return ablation


def _hosts(
    workload: Workload, options: TuneOptions, say: Callable[[str], None]
) -> contextlib.AbstractContextManager[PairHosts]:
    if options.hosts is None:
        return contextlib.nullcontext(PairHosts())
    return options.hosts(workload, _limit_s(options), say)


def _limit_s(options: TuneOptions) -> float:
    """Return the time for one trial at most."""
    return max(120.0, options.budget_s)


def _runner(
    workload: Workload,
    machine: Machine,
    options: TuneOptions,
    hosts: PairHosts,
    recorded: dict[str, list[Record]],
) -> TrialRunner:
    cache = compile_cache(workload)
    return TrialRunner(
        workload=workload,
        machine=machine,
        out=options.out,
        limit_s=_limit_s(options),
        cache=cache,
        was_compiled=not options.resume and any(cache.iterdir()),
        wait=options.wait,
        clock=options.clock,
        runner=options.runner,
        recorded=recorded,
        elsewhere=hosts.next_pair,
    )


def _packed(options: TuneOptions, tell: Tell) -> tuple[TuneOptions, PackCost | None]:
    """Pack what was asked for; return the options with what is left of the budget, and its cost."""
    if not options.pack:
        return options, None
    began_s = options.clock()
    cost = pack_for_tuning(options.pack, options.out, options.budget_s, tell)
    left_s = max(options.budget_s - (options.clock() - began_s), 1.0)
    # What was packed is to be tried, whatever else is.
    only = (*options.only, packed_technique()) if options.only and cost.is_packed else options.only
    return replace(options, budget_s=left_s, only=only), cost


def _wrong_places(workload: Workload, acknowledged: Sequence[str]) -> list[tuple[str, str]]:
    """Return code and words of what the script does wrong on several ranks and is not acknowledged.

    That is by its code here, in pyproject.toml, or in a comment.
    """
    early = source.codes_of_wrong_training(of_ranks=False)
    of_ranks = source.codes_of_wrong_training(of_ranks=True)
    known = early | of_ranks | rules.codes_of_wrong_training()
    for code in acknowledged:
        if code not in known:
            raise UserError(unknown("code", code, known))
    path = find_script(workload)
    try:
        found = list(check([path]).findings()) if path else []
    except UserError:  # a pyproject.toml that cannot be read hinders no tuning
        found = []
    wrong = [
        (each.code, f"{shown(Path(file), workload)}:{each.line}: {each.code}: {each.because}")
        for file, each in found
        if each.code in known.difference(acknowledged)
    ]
    _refuse([place for place in wrong if place[0] in early])
    return [place for place in wrong if place[0] in of_ranks]


def _refuse_what_ran(
    baseline: Trial | None,
    machine: Machine,
    wrong_on_ranks: Sequence[tuple[str, str]],
    acknowledged: Sequence[str],
) -> None:
    """End a tuning for what its first measurement shows, or on several ranks the source.

    Raises:
        UserError: if there is such a thing.
    """
    if baseline is None or baseline.profile is None:
        return
    wanted = rules.codes_of_wrong_training().difference(acknowledged)
    found = rules.add_findings(baseline.profile, machine).findings
    seen = [(each.code, f"{each.code}: {each.because}") for each in found if each.code in wanted]
    _refuse([*seen, *(wrong_on_ranks if baseline.profile.ranks else ())])


def _refuse(wrong: Sequence[tuple[str, str]]) -> None:
    """End a tuning whose baseline does not train what was meant, in one line."""
    if not wrong:
        return
    code, words = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    every = ",".join(sorted({code for code, _words in wrong}))
    raise UserError(
        f"{words}{more}; tuned, it would only be wrong sooner: 'flatout rules {code}' says how to "
        f"fix it, --acknowledge {every} tunes it as it is"
    )


def _task_of(
    machine: Machine, options: TuneOptions, hosts: int, sample: StoredSample | None
) -> TuningTask:
    """Return what the decisions of a tuning depend on."""
    earlier = read_history(options.history) if options.history is not None else []
    return TuningTask(
        machine=machine,
        budget_s=options.budget_s,
        numerics=options.numerics,
        only=options.only,
        skip=options.skip,
        accepts_load=options.accepts_load,
        confirm_pairs=options.confirm_pairs,
        ranks=options.ranks,
        hosts=hosts,
        # Another runner runs one trial at a time.
        takes_turns=hosts == 1 and options.ranks == 1 and options.runner is run_trial,
        stored_sample=sample,
        earlier=errors_on(_device_of(machine), earlier),
    )


def _as_begun(task: TuningTask, begun: Mapping[str, Any]) -> TuningTask:
    """Return the task of a tuning that goes on, with what it was asked for at its beginning.

    What this call asks for itself stays; the report says no more than `tune --resume`.
    """
    defaults = TuningTask(machine=task.machine)
    given: dict[str, Callable[[Any], Any]] = {
        "numerics": Numerics,
        "only": tuple,
        "skip": tuple,
        "accepts_load": bool,
        "ranks": int,
        "hosts": int,
    }
    try:
        kept = {
            name: kind(begun[name])
            for name, kind in given.items()
            if name in begun and getattr(task, name) == getattr(defaults, name)
        }
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the journal's header cannot be read: {error}; run tune without --resume"
        ) from None
    return replace(task, **kept, earlier=begun.get("earlier", {}))


@contextlib.contextmanager
def _held(options: TuneOptions) -> Iterator[None]:
    """Keep other tunings out of the out folder; leave none behind where nothing was measured.

    What was packed for this tuning is offered to its trials alone.
    """
    out = options.out
    before = {name: os.environ.get(name) for name in (STORES, TIMED_SAMPLE)}
    missing = [path for path in (out, *out.parents) if not path.exists()]
    try:
        with held_out(out):
            yield
    except UserError as error:
        if isinstance(error, BaselineFailedError):
            (out / JOURNAL).unlink(missing_ok=True)
        for made in missing:
            with contextlib.suppress(OSError):
                made.rmdir()  # unless it holds trials
        raise
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _device_of(machine: Machine) -> str:
    """Return what a tuning's findings hold for."""
    devices = machine.devices or (machine.device,)
    return ", ".join(device.name for device in devices)


def header_of(workload: Workload, machine: Machine) -> dict[str, Any]:
    """Return what trials belong to: those of nothing else count with them."""
    return {
        "records": RECORDS,
        "workload": workload.command_line,
        "torch": machine.torch_version,
        "device": _device_of(machine),
        "cpu": machine.cpu_name,
        "cores": machine.usable_cores,
        "files": digests_of(workload),
    }


def _ablation(tuned: Tuned, runner: TrialRunner) -> Ablation:
    state, baseline, proof = tuned.state, tuned.baseline, tuned.proof
    history = state.history
    own = [row.comparison for row in state.rows if row.stage != "spread"]
    pairs = [x for x in (*own, proof.confirmation) if x and x.source == "pairs"]
    # Fewer pairs than that do not know the noise.
    known = [x.resolution for x in pairs if x.n >= Rule().min_pairs_without_prior]
    recipe = state.recipe
    about: dict[str, Any] = {
        "script": runner.workload.command_line,
        "torch": history.machine.torch_version,
        "device": baseline.device_name,
    }
    if proof.confirmation:
        about["ratio"] = round(proof.confirmation.ratio, 3)
    final = proof.final and _with_processes(proof.final, state.recipe, history)
    is_timed = any(code_of(note) == SAMPLE_TIMED for note in state.notes)
    if is_about_data(state.search) and state.stopped != "interrupted" and not is_timed:
        now = state.looked(proof.final or state.profile, recipe)
        state.notes += note_prepared(recipe, now, history.machine)
    if runner.was_compiled and any(row.startup_s for row in state.rows):
        state.notes.append(words("tune_note.warm"))
    if history.hosts > 1:
        n, played = str(1 + len(history.elsewhere)), str(sum(history.elsewhere.values()))
        state.notes.append(words("hosts.measured", n=n, pairs=played))
    if history.disturbed:
        name = "disturbed_count" if history.accepts_load else "disturbed_lost"
        counts = {"n": str(history.disturbed), "trials": str(history.timed)}
        lost = format_duration(history.lost_s)
        state.notes.append(words(f"tune_note.{name}", **counts, time=lost))
    return Ablation(
        workload=runner.workload.command_line,
        baseline=_with_processes(baseline, state.baseline, history),
        rows=tuple(state.rows),
        recipe=replace(recipe, about=about) if recipe.choices else recipe,
        needed=tuple(choice.label for choice in state.floor.choices),
        confirmation=proof.confirmation,
        final=final,
        final_check=proof.check,
        feeding=proof.feeding,
        aa_check=history.aa_check,
        resolution=max(known, default=math.inf if pairs else 1.0),
        foreign_shares=tuple(history.foreign_shares),
        cost_s=state.budget.elapsed_s + runner.recorded_s,
        stopped=state.stopped,
        notes=tuple(state.notes),
    )


def _with_processes(profile: Profile, recipe: Recipe, history: TrialHistory) -> Profile:
    """Return the profile with the step of every process in which its recipe was timed."""
    steps_s = history.step_s.get(key_of(recipe), [])
    return replace(profile, process_steps_ms=tuple(1e3 * step_s for step_s in steps_s))
