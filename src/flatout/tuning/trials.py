"""Run one recipe once in a fresh process and say how it went.

`with_counters` adds what flatout's own process reads alongside, and what that says of the trial.
"""

import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flatout.agent.entry import GUARD_RECORD, GUARD_RECORDS
from flatout.analysis import disturbance
from flatout.analysis.loader_faults import (
    BY_CODE,
    Fault,
    emptiness,
    find_fault,
    find_missing_device,
)
from flatout.analysis.profile import losses_of, summarise, window_in
from flatout.analysis.ranks import add_ranks, leading, ranked_in_order
from flatout.analysis.steps import MIN_STEPS
from flatout.hardware.counters import CounterSampler, open_sources
from flatout.launch.trial_process import Ending, ProcessOptions, SharedRun, run_process
from flatout.records import catalogue
from flatout.records.errors import describe_exhaustion, is_out_of_memory
from flatout.records.machine import Machine
from flatout.records.messages import joined, words
from flatout.records.profile import Profile
from flatout.records.recipe import Recipe
from flatout.records.trial import TECHNIQUE_NOTE, Applied, Outcome, Trial, Workload
from flatout.records.trial_result import TrialResult
from flatout.records.trial_spec import TrialSpec
from flatout.records.units import format_share

STALLED_SHARE = 0.1
"""Time in which some process waited for memory, from which on it is said: of less, a step shows
little, and mere start-up reads files that long."""


def with_counters(
    trial: Trial, results: Sequence[TrialResult], counters: CounterSampler, machine: Machine
) -> Trial:
    """Return the trial with the device's counters on its profile, and with its disturbances."""
    result, profile = leading(results), trial.profile
    if profile is None or result is None:
        return trial
    measured = window_in(result).measured
    gpu = None
    if measured and result.device.kind in ("cuda", "rocm"):
        began_s = measured[0].end - measured[0].wall_s
        gpu = counters.readings(result.device.uuid, began_s, measured[-1].end)
    loaded = disturbance.of_load(trial.details.get("load", {}), profile, machine)
    profile = replace(
        profile,
        gpu=gpu,
        gpu_util_share=gpu.util_share if gpu else None,
        notes=(*profile.notes, *disturbance.notes_on(gpu)),
        invalid=(*profile.invalid, *loaded, *disturbance.of_device(gpu)),
    )
    return replace(trial, profile=profile)


ENTRY = "flatout.agent.entry"
MIN_MEASURED = 3
"""Fewer clean steps than this are no measurement, even of a script that ended on its own."""

REFUSALS = ("not_applicable", "failed")
"""What becomes of a technique that was asked and did not act."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialOptions(TrialSpec):
    """How one trial is run: what its process does, and how long; `run_trial` adds the recipe."""

    limit_s: float = 300.0
    """Wall time after which the process is ended."""
    hang_s: float = 120.0
    """Time without any sign of training after which it counts as hung."""
    keep: Path | None = None
    """Where the guard's record goes, and the files of `keep_names`."""
    keep_names: tuple[str, ...] = ()
    """Names, with wildcards, of files that probes leave in the trial's folder."""
    cache: Path | None = None
    """Compile cache shared by the trials of one tuning; None leaves the user's."""


def run_trial(
    workload: Workload,
    recipe: Recipe,
    machine: Machine,
    options: TrialOptions = TrialOptions(),
    shared: SharedRun | None = None,
) -> Trial:
    """Run the workload with the recipe until it showed enough; every ending is a result."""
    chosen = catalogue.build(recipe)
    environment: Mapping[str, str] = dict(os.environ)
    for technique in chosen:
        environment = technique.environment(environment)
    if options.cache is not None:
        environment = {**environment, "TORCHINDUCTOR_CACHE_DIR": str(options.cache)}
    mode = "guard" if options.guard is not None else "measure"
    with CounterSampler(open_sources(environment)) as counters:
        ending = run_process(
            workload,
            ProcessOptions(
                entry=ENTRY,
                spec=replace(options, mode=mode, recipe=recipe),
                keep=(GUARD_RECORDS, *options.keep_names),
                environment=environment,
                limit_s=options.limit_s,
                hang_s=options.hang_s,
                shared=shared,
            ),
            keep=options.keep,
        )
    trial = _trial(recipe, ending, machine, options)
    return with_counters(trial, ending.results, counters, machine)


def _trial(recipe: Recipe, ending: Ending, machine: Machine, options: TrialOptions) -> Trial:
    result = leading(ending.results)
    outcome, message = outcome_of(ending, options)
    applied = applied_of(recipe, ending.results)
    profile: Profile | None = None
    partial: Profile | None = None
    is_measured = outcome in (Outcome.OK, Outcome.NAN) and options.guard is None
    if result is not None and is_measured and window_in(result).measured:
        profile = add_ranks(summarise(result, machine), ending.results, machine)
        said = [message] if outcome is Outcome.NAN else []
        said += [
            words(TECHNIQUE_NOTE, technique=item.technique, why=item.why)
            for item in applied
            if item.status == "applied" and item.why
        ]
        profile = replace(profile, notes=(*profile.notes, *said, *_shortage_words(ending)))
    elif result is not None and options.guard is None:
        partial = _partial(ending, result, machine)
    guard_path = options.keep / GUARD_RECORD if options.keep else None
    fault = None if outcome is Outcome.OK else _fault(ending)
    return Trial(
        recipe=recipe,
        outcome=outcome,
        profile=profile,
        partial=partial,
        message=message,
        traceback="" if outcome is Outcome.OK else _traceback(ending),
        applied=applied,
        wall_s=ending.wall_s,
        changed_files=ending.changed_files,
        undone=ending.undone,
        guard_path=str(guard_path) if guard_path and guard_path.exists() else None,
        details={
            "load": dict(result.load) if result else {},
            "exit_code": ending.exit_code,
            "orphans": ending.orphans,
            "is_overlaid": ending.is_overlaid,
            "kept": list(ending.kept),
            "why": ending.why,
            "fault": fault.code if fault else None,
            "loaders": _own_loaders(result) if fault else [],
            "errors": list(result.errors) if result else [],
            "probes": dict(result.probes) if result else {},
            "exhaustion": ending.exhaustion,
        },
    )


def outcome_of(ending: Ending, options: TrialOptions) -> tuple[Outcome, str]:
    """Return how a process ended and one line about it."""
    if ending.why == "unrecorded":
        return Outcome.CRASH, words("fault.unrecorded", error=str(ending.error))
    outcome, message = _outcome(ending, options)
    if outcome is Outcome.CRASH and ending.shortage.num_kills:
        message = joined(message, *_shortage_words(ending))
    return outcome, message


def _outcome(ending: Ending, options: TrialOptions) -> tuple[Outcome, str]:
    result = _crashed(ending) or leading(ending.results)
    if _ran_out_of_memory(ending, result):
        return Outcome.OOM, _exhausted_words(ending)
    if result is not None and result.why == "refused":
        return Outcome.REFUSED, words("failure.head_refused")
    if result is not None and result.why == "done":
        return _judged(result, options)
    return _cut_short(ending, options) or _ended(ending, result, options)


def _partial(ending: Ending, result: TrialResult, machine: Machine) -> Profile | None:
    """Return what was seen before a bad end, None where that were too few steps."""
    if len(window_in(result).measured) < MIN_MEASURED:
        return None
    profile = add_ranks(summarise(result, machine), ending.results, machine)
    steps = len(window_in(result).steps)
    notes = [words("note.partial", n=str(steps))]
    if result.why == "killed":
        notes.append(words("note.partial_killed"))
    return replace(profile, notes=(*profile.notes, *notes))


def _crashed(ending: Ending) -> TrialResult | None:
    """Return what the first process that failed wrote: the others fail for lack of it."""
    crashed = [result for result in ending.results if result.crash]
    return min(crashed, key=lambda result: result.crashed_at, default=None)


def _traceback(ending: Ending) -> str:
    """Return the script's last output, of several ranks the traceback of the first that failed.

    A launcher prints a long summary below it, and the other ranks fail too.
    """
    crashed = _crashed(ending)
    if crashed is None or crashed.ranks is None:
        return ending.log[-4_000:]
    return f"rank {crashed.ranks.rank}:\n{crashed.crash_trace}"


def _cut_short(ending: Ending, options: TrialOptions) -> tuple[Outcome, str] | None:
    if ending.why not in ("hang", "limit"):
        return None
    if ending.trains_elsewhere and not any(result.segments for result in ending.results):
        return Outcome.NO_STEPS, words("trial.other_thread")
    text = words("trial.silent", seconds=f"{options.hang_s:.0f}")
    if ending.why == "limit":
        text = words("trial.over_limit", seconds=f"{options.limit_s:.0f}")
    if ending.waits_for_batch and ending.why == "hang":
        hung, stuck = BY_CODE["worker_hung"].sentence(""), "; ".join(ending.stuck)
        name = "fault.waits_stuck" if stuck else "fault.waits"
        return Outcome.HANG, words(name, text=text, stuck=stuck, fault=hung)
    return Outcome.HANG, text


def _ended(
    ending: Ending, result: TrialResult | None, options: TrialOptions
) -> tuple[Outcome, str]:
    if ending.exit_code not in (0, None) or (result is not None and result.crash):
        return Outcome.CRASH, _crash_line(ending, result)
    if result is not None and result.segments:
        return _judged(result, options)
    if result is not None and result.trains_elsewhere:
        return Outcome.NO_STEPS, words("trial.other_thread")
    if ending.empty_loader is not None:
        return Outcome.NO_STEPS, emptiness(ending.empty_loader)
    return Outcome.NO_STEPS, words("trial.no_step")


def _judged(result: TrialResult, options: TrialOptions) -> tuple[Outcome, str]:
    window = window_in(result)
    losses = losses_of(window.steps)
    if any(not math.isfinite(loss) for loss in losses):
        first = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
        return Outcome.NAN, words("trial.not_finite", step=str(first + 1))
    if options.steps is not None:
        if len(window.steps) >= options.steps:
            return Outcome.OK, ""
        # A guard trial of a short script compares what there is.
        return Outcome.OK, words("trial.made_only", steps=_steps(len(window.steps)))
    if len(window.measured) < MIN_MEASURED:
        least = str(MIN_STEPS + 3)
        return Outcome.TOO_SHORT, words(
            "trial.too_few", steps=_steps(len(window.steps)), least=least
        )
    return Outcome.OK, ""


def _steps(count: int) -> str:
    return words("trial.one_step") if count == 1 else words("trial.some_steps", n=str(count))


def _ran_out_of_memory(ending: Ending, result: TrialResult | None) -> bool:
    crash = result.crash if result else ""
    text = crash + ending.log[-4_000:]
    # No exit code: a script that is slow to end was ended once its result was there.
    if ending.exit_code in (0, None) and not crash:
        return False
    return is_out_of_memory(text) or _was_killed(ending)


def _was_killed(ending: Ending) -> bool:
    """Tell of a -9 that was not ours: the kernel's out-of-memory killer, or someone else."""
    return ending.exit_code == -9 and ending.why == "ended"


def _exhausted_words(ending: Ending) -> str:
    """Return how memory ran out."""
    if _was_killed(ending):
        return words("trial.killed_counted" if ending.shortage.num_kills else "trial.killed")
    if not ending.exhaustion:
        return words("trial.out_of_memory")
    return words("trial.out_of_memory_where", where=describe_exhaustion(ending.exhaustion))


def _shortage_words(ending: Ending) -> Iterator[str]:
    """Say what slowed or killed processes near the limit of memory."""
    kills, stalled_s = ending.shortage
    if kills:
        yield words("note.kernel_killed_some" if kills > 1 else "note.kernel_killed", n=str(kills))
    if stalled_s >= STALLED_SHARE * ending.wall_s > 0:
        yield words("note.stalled", share=format_share(stalled_s / ending.wall_s))


def _fault(ending: Ending) -> Fault | None:
    """Return what ended the loader, where the script failed for its sake."""
    if ending.why == "hang":
        return BY_CODE["worker_hung"] if ending.waits_for_batch else None
    crashed = _crashed(ending)
    if ending.exit_code in (0, None) and crashed is None:
        trained = any(one.segments or one.trains_elsewhere for one in ending.results)
        had_no_data = ending.why == "ended" and ending.empty_loader is not None and not trained
        return BY_CODE["empty_data"] if had_no_data else None
    return find_fault(_last_words(ending), ending.exit_code)


def _own_loaders(result: TrialResult | None) -> list[dict[str, Any]]:
    """Return the workers that the script's loaders asked for."""
    known = ("num_workers", "prefetch_factor")
    return [
        {"address": seen.address, **{name: seen.asked[name] for name in known}}
        for seen in (result.loaders if result else ())
    ]


def _last_words(ending: Ending) -> str:
    """Return what the crash says, then what was printed: a worker's end may stand only there."""
    crashed, log = _crashed(ending), ending.log[-4_000:]
    return f"{crashed.crash}\n{crashed.crash_trace}\n{log}" if crashed else log


def _crash_line(ending: Ending, result: TrialResult | None) -> str:
    fault = _fault(ending)
    if fault is not None:
        return fault.sentence(_last_words(ending))
    missing = find_missing_device(_last_words(ending))
    if missing is not None:
        return missing
    if result is not None and result.crash:
        return str(result.crash).splitlines()[-1][:300]
    if ending.exit_code is not None and ending.exit_code < 0:
        number = -ending.exit_code
        return words("trial.by_signal", number=str(number), name=signal.strsignal(number) or "")
    # A launcher's last line is a rule of its frame.
    lines = [line for line in ending.log.splitlines() if any(map(str.isalnum, line))]
    last = lines[-1][:300] if lines else ""
    return words("trial.exit_code", code=str(ending.exit_code), last=last)


def applied_of(recipe: Recipe, results: Sequence[TrialResult]) -> tuple[Applied, ...]:
    """Return what became of each technique; one that any rank refused did not act as a whole."""
    result = leading(results)
    if result is None:
        return ()
    others = [one for one in ranked_in_order(results) if one is not result and one.segments]
    found = []
    for name in recipe.names:
        status, why = result.status.get(name, ("unseen", words("trial.never_reached")))
        refusing = [one for one in others if one.status.get(name, ("",))[0] in REFUSALS]
        if status not in REFUSALS and refusing:
            status, why = refusing[0].status[name]
            rank = str(refusing[0].ranks.rank if refusing[0].ranks else 0)
            why = words("joint.rank", rank=rank, why=why)
        found.append(Applied(technique=name, status=status, why=why))
    return tuple(found)
