"""From what a training process wrote to a Profile. Pure; runs in the parent."""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from flatout.analysis.journey import journey_of
from flatout.analysis.regime import held_to_phases, with_regime
from flatout.analysis.steps import (
    USUAL,
    Step,
    Window,
    block_means,
    steps_of,
    whole_epochs,
    window_of,
)
from flatout.analysis.trace import of_steps
from flatout.records.json_records import from_plain
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.phase_clock import (
    BACKWARD,
    DATA_WAIT,
    EVAL,
    FORWARD,
    NAMES,
    OPTIMIZER,
    OTHER,
    SAVE,
)
from flatout.records.profile import (
    MAX_STEPS_KEPT,
    PHASES,
    Ceilings,
    LoaderFacts,
    ModelFacts,
    Profile,
    RareWork,
    Spread,
    most_times,
)
from flatout.records.trial_result import LoaderSeen, TrialResult
from flatout.records.units import format_ms

IN_A_TRAINING = 20.0
"""What listening costs in a training, over what its wrappers take in a tight loop: the training has
taken the caches for itself, and an event has more behind it than a change of phase. Paired runs
showed 0.69, 1.88 and 0.49 % of steps of 18, 1.8 and 83 ms (the records `overhead_fast` and
`overhead`) where the loop says 0.034, 0.080 and 0.034 %: 20, 23 and 15 times."""
MAX_LOSSES = 1_000
"""Losses kept in a profile; a plot needs no more."""
RARE_TIMES, RARE_S = 2.0, 0.01
"""By how many usual steps, and by how many seconds, a step with rare work is longer at least: less
is what a busy machine does to a step."""
MIN_RARE = 3
OF_ITS_OWN = 0.8
"""Part of that which must lie outside model and optimizer."""
TELLING_SHARE = 0.1
"""From a tenth of a run on, what is left out of its steps may be what is worth looking at."""


def window_in(result: TrialResult) -> Window:
    """Return the steps that a result holds and which of them count."""
    return window_of(steps_of(result.segments), result.period)


def trial_step_s(window: Window, epoch_steps: int | None = None) -> float:
    """Return the one number of a trial: the median over blocks of the mean step time, seconds.

    With workers the blocks are whole epochs where there are any: steps at an epoch's begin, while
    all workers make their first batches, are slow, and those that find batches ready are fast.
    """
    walls = [step.wall_s for step in window.measured]
    if window.period > 1 and epoch_steps:
        epochs = whole_epochs(window, epoch_steps)
        if epochs:
            return statistics.median(
                statistics.fmean(step.wall_s for step in epoch) for epoch in epochs
            )
    return statistics.median(block_means(walls, window.period))


def summarise(result: TrialResult, machine: Machine) -> Profile:
    """Return the profile of a training process that made at least one measured step."""
    window = window_in(result)
    epoch_steps = _epoch_steps(result, window)
    step_s = trial_step_s(window, epoch_steps)
    walls_ms = [1e3 * s for s in block_means([x.wall_s for x in window.measured], window.period)]
    phases = _phases_ms(window, 1e3 * step_s, result)
    device = result.device
    start_ms = epoch_start_ms(result, window)
    whole_s = step_s + (start_ms / 1e3 / epoch_steps if epoch_steps else 0.0)
    evaluated_s, run_s = _evaluated_s(window, start_ms / 1e3)
    later_s = sum(step.wall_s for step in window.steps[1:]) or math.inf
    samples = statistics.fmean(s.samples for s in window.sampled)
    losses = losses_of(window.steps)
    busy = device.busy_share
    compute = sum(phases[name] for name in ("forward", "backward", "optimizer"))
    load, traced = result.load, device.trace
    profile = Profile(
        step_ms=Spread(
            median=1e3 * step_s,
            p10=float(np.quantile(walls_ms, 0.1)),
            p90=float(np.quantile(walls_ms, 0.9)),
            n=len(window.measured),
        ),
        phases_ms=phases,
        samples_per_s=samples / whole_s,
        device_kind=device.kind,
        device_name=device.name or machine.cpu_name,
        device_busy_share=compute / (1e3 * step_s) if busy is None else busy,
        peak_bytes=device.peak,
        overhead_share=_listening_s_per_step(result, window) / step_s,
        warmup_steps=window.warmup_steps,
        warmup_ms=1e3 * window.warm_up_s,
        first_step_ms=1e3 * window.steps[0].wall_s,
        losses=tuple(losses[:MAX_LOSSES]),
        batches_per_step=statistics.fmean(s.batches for s in window.sampled),
        backwards_per_step=statistics.fmean(s.backwards for s in window.sampled),
        samples_per_step=samples,
        eval_ms=_eval_ms(window, phases),
        eval_share=evaluated_s / run_s if run_s else 0.0,
        rare=_rare_work(window, result.collection_s, _disturbed_share(load, machine)),
        epoch_start_ms=start_ms,
        epoch_steps=epoch_steps,
        cpu_threads=int(result.environment.get("threads", 0)),
        minor_faults_per_step=load.get("minor_faults_per_s", 0.0) * step_s,
        compiling=result.compiling,
        # As a part of the time that it is counted in: evaluations and plots have more of it.
        collection_ms_per_step=1e3 * step_s * min(1.0, result.collection_s / later_s),
        delay_share=load.get("delay_share", 0.0),
        foreign_share=load.get("foreign_share", 0.0),
        loaders=tuple(_loader(item, window) for item in result.loaders),
        models=tuple(_model(item, n, window) for n, item in enumerate(result.models)),
        optimizers=result.optimizers,
        notes=tuple(_notes(result, window, busy, (evaluated_s, run_s))),
        environment=result.environment,
        steps_ms=_steps_ms(window),
        trace=of_steps(traced, _segments_per_step(result, window)) if traced else None,
    )
    profile = replace(profile, ceilings=ceilings_of(profile))
    return with_regime(replace(profile, journey=journey_of(result, window, profile)))


def with_kernels_of(profile: Profile, seen: Profile) -> Profile:
    """Return a timed profile with what a traced trial of the same recipe saw on the device.

    Where none was traced, or the profile has a trace of its own, it stays as it is.
    """
    if profile.trace is not None or seen.trace is None:
        return profile
    phases = dict(profile.phases_ms)
    copied_ms = min(seen.phases_ms["h2d"], phases["other"])
    phases |= {"h2d": copied_ms, "other": phases["other"] - copied_ms}
    profile = replace(
        profile,
        phases_ms=phases,
        device_busy_share=seen.device_busy_share,
        trace=seen.trace,
        notes=tuple(note for note in profile.notes if note != words("note.no_trace")),
    )
    return with_regime(replace(profile, ceilings=ceilings_of(profile)))


def _steps_ms(window: Window) -> tuple[tuple[float, ...], ...]:
    """Return the phases of each measured step; copies to a device are not told apart there."""
    rows = []
    for step in window.sampled[:MAX_STEPS_KEPT]:
        by_name = dict(zip(NAMES[:OTHER], step.seconds[:OTHER], strict=True))
        by_name["other"] = sum(step.seconds[OTHER:])
        rows.append(tuple(round(1e3 * by_name.get(name, 0.0), 4) for name in PHASES))
    return tuple(rows)


def _phases_ms(window: Window, step_ms: float, result: TrialResult) -> dict[str, float]:
    """Return milliseconds by phase: medians, scaled so that they add up to the step.

    Their sum differs from the median step by a few percent, and the scaling spreads that evenly.
    """
    by_name = window.medians_ms(lambda step: step.seconds)
    by_name["h2d"] = 0.0
    copied_s = result.device.h2d_s_per_segment
    if copied_s:
        copied_ms = 1e3 * copied_s * _segments_per_step(result, window)
        by_name["h2d"] = min(copied_ms, by_name["other"])
        by_name["other"] -= by_name["h2d"]
    total = sum(by_name.values())
    scale = step_ms / total if total else 0.0
    return {name: by_name[name] * scale for name in PHASES}


def _eval_ms(window: Window, phases: Mapping[str, float]) -> float:
    """Return the part of `other` in which the trained model was evaluated."""
    column = [step.seconds[EVAL] for step in window.sampled]
    return min(phases["other"], 1e3 * statistics.median(block_means(column, window.period)))


def ceilings_of(profile: Profile) -> Ceilings:
    """Return what the step could gain at most if one cause cost nothing, from its phases."""
    unbounded = Ceilings(free_data=math.inf, free_copies=math.inf, compute_only=math.inf)
    derived = held_to_phases(profile, unbounded)
    return replace(derived, free_copies=most_times(profile.share("h2d")))


def _listening_s_per_step(result: TrialResult, window: Window) -> float:
    """Return what hook points and probes took of a step, as the training process estimated."""
    hooks_s = result.listening_s_per_step * _segments_per_step(result, window)
    probes_s: float = sum(seen.get("listening_s", 0.0) for seen in result.probes.values())
    steps = max(1, len(window.steps))
    # The device clock's marks were timed in the training itself.
    return IN_A_TRAINING * (hooks_s + probes_s / steps) + result.marking_s / steps


def _segments_per_step(result: TrialResult, window: Window) -> float:
    return len(result.segments) / max(1, len(window.steps))


def _loader(seen: LoaderSeen, window: Window) -> LoaderFacts:
    waits = [step.seconds[DATA_WAIT] / max(1, step.batches) for step in window.sampled]
    facts: LoaderFacts = from_plain(
        LoaderFacts,
        {
            **seen.asked,
            "address": seen.address,
            "is_training": seen.is_training,
            "batches_drawn": seen.batches,
            "builds": seen.builds,
            "epochs_started": seen.epochs,
            "first_batch": seen.first_batch,
            "epoch_samples": seen.epoch_samples,
            "batch_bytes": int(statistics.median(seen.batch_bytes or [0])),
        },
    )
    if not seen.is_training or facts.workers:
        return facts
    return replace(facts, fetch_ms=1e3 * statistics.median(waits))


def _model(model: ModelFacts, number: int, window: Window) -> ModelFacts:
    calls = [step.calls[number] if number < len(step.calls) else 0 for step in window.sampled]
    return replace(model, calls_per_step=statistics.fmean(calls))


def epoch_start_ms(result: TrialResult, window: Window) -> float:
    """Return what a later epoch's start and the end before it cost, beyond an ordinary wait.

    Ending the workers and making new ones, until the first batch is there; and what the step with
    that batch takes longer, while all workers make their first batches on its cores.
    """
    wait_s = statistics.median(step.seconds[DATA_WAIT] for step in window.sampled)
    loaders = [seen for seen in result.loaders if seen.is_training and seen.starts_s]
    if len(loaders) != 1 or len(loaders[0].starts_s) < 2:
        return 0.0
    start_s = statistics.median(loaders[0].starts_s[1:])
    end_s = statistics.median(loaders[0].ends_s or [0.0])
    return 1e3 * (max(0.0, start_s - wait_s) + end_s + _slower_start_s(window))


def _slower_start_s(window: Window) -> float:
    """Return what the first step of an epoch computes longer than others alongside its workers."""

    def computed_s(step: Step) -> float:
        return sum(step.seconds[phase] for phase in (FORWARD, BACKWARD, OPTIMIZER))

    firsts_s = [computed_s(step) for step in window.steps[1:] if step.is_dirty]
    if window.period <= 1 or not firsts_s:
        return 0.0
    usual_s = statistics.fmean(map(computed_s, window.sampled))
    return max(0.0, statistics.median(firsts_s) - usual_s)


def _epoch_steps(result: TrialResult, window: Window) -> int | None:
    """Return the training steps of an epoch: a loader's length counts batches.

    The median, because frameworks that fetch one batch ahead show one less at an epoch's end. Of a
    script that leaves its epochs early, the batches that it draws in one.
    """
    loaders = [seen for seen in result.loaders if seen.is_training]
    batches = statistics.median(step.batches for step in window.sampled)
    length = loaders[0].asked["steps_per_epoch"] if len(loaders) == 1 else None
    if length is None or batches < 1:
        return None
    drawn = [later - one for one, later in itertools.pairwise(loaders[0].begun_at)]
    if len(drawn) > 1:  # one alone may be a look at the first batch
        length = min(length, max(drawn))
    return max(1, int(length / batches))


def _notes(
    result: TrialResult, window: Window, busy: float | None, evaluated_s: tuple[float, float]
) -> list[str]:
    left_s, run_s = evaluated_s
    is_fed = any(seen.is_training for seen in result.loaders)
    left, run = format_ms(1e3 * left_s), format_ms(1e3 * run_s)
    devices = result.device.count
    undrawn = "note.thread_loader" if result.draws_elsewhere else "note.no_loader"
    # Batches that are from no loader are from an iterator that no `DataLoader` of torch made.
    has_batches = any(step.batches for step in window.sampled)
    said = (
        (not window.is_warm, words("note.not_steady")),
        (not window.are_clean, words("note.unclean")),
        (left_s >= TELLING_SHARE * run_s > 0, words("note.left_out", left=left, run=run)),
        (not is_fed, words("note.foreign_loader" if has_batches else undrawn)),
        (not result.models, words("note.no_root")),
        (result.trains_unseen, words("note.later_model")),
        (devices > 1, words("note.several_devices", n=str(devices))),
        (result.device.kind == "cuda" and busy is None, words("note.no_trace")),
    )
    notes = [text for holds, text in said if holds]
    return [*notes, *(words("note.probe_failed", error=text) for text in result.errors)]


def _evaluated_s(window: Window, epoch_start_s: float) -> tuple[float, float]:
    """Return the seconds that evaluations took in steps that do not count, and those of the run.

    An evaluation is more than its calls of the model: it is what its step takes longer than an
    ordinary one, without saving and the start of the next epoch. All that comes before the first
    step, and is done once in it, is no part of the run: the look is short, the training is long.
    """
    measured = {id(step) for step in window.measured}
    step_s = statistics.median(step.wall_s for step in window.measured)
    usual_s = _usual_eval_s(window)
    left_s = run_s = 0.0
    for number, step in enumerate(window.steps):
        calls_s = _own_eval_s(step, usual_s)
        wall_s = step.wall_s if number else min(step.wall_s, step_s + calls_s)
        run_s += wall_s
        if calls_s and id(step) not in measured:
            left_s += max(calls_s, wall_s - step.seconds[SAVE] - step_s - epoch_start_s)
    return left_s, run_s


def _usual_eval_s(window: Window) -> float:
    return statistics.median(step.seconds[EVAL] for step in window.sampled)


def _own_eval_s(step: Step, usual_s: float) -> float:
    """Return the seconds of a step's own evaluation; a teacher that most steps call is none.

    Nor is one that is called in the first steps only, while every call is listened to.
    """
    calls_s = step.seconds[EVAL]
    return calls_s if step.is_dirty and calls_s > USUAL * usual_s else 0.0


def _disturbed_share(load: Mapping[str, float], machine: Machine) -> float:
    """Return for what share of the time other processes and other machines had one of the cores."""
    shares = load.get("foreign_share", 0.0) + load.get("steal_share", 0.0)
    return shares * machine.usable_cores


def _rare_work(window: Window, collection_s: float, disturbed_share: float) -> RareWork | None:
    """Return what some steps do outside model and optimizer, which the others do not.

    None where waiting for a core that others had explains it: that, too, is in some steps only.
    Evaluations, epochs' starts and garbage collections (0.1 s each for the objects of torch) have
    numbers of their own, as have the bursts in which several workers deliver. Of most steps that
    were not looked into only the length is known: those that were say whether such steps are longer
    for work of the loop, or for a batch they wait for.
    """
    first = window.measured[0]
    after = [*itertools.dropwhile(lambda step: step is not first, window.steps)]
    usual_s = statistics.median(step.wall_s for step in window.measured)
    usual_other_s = statistics.median(step.seconds[OTHER] for step in window.sampled)
    usual_wait_s = statistics.median(step.seconds[DATA_WAIT] for step in window.sampled)
    usual_eval_s = _usual_eval_s(window)

    def extra_s(step: Step) -> float:
        return step.wall_s - usual_s

    def waited_s(step: Step) -> float:
        is_stall = window.period == 1 and not step.starts
        return step.seconds[DATA_WAIT] - usual_wait_s if is_stall else 0.0

    least_s = max(RARE_S, RARE_TIMES * usual_s)
    longer = [step for step in after if extra_s(step) > least_s]
    rare = [step for step in longer if not _own_eval_s(step, usual_eval_s)]
    seen = [
        step
        for step in rare
        if step.is_sampled or step.seconds[SAVE] or waited_s(step) >= OF_ITS_OWN * extra_s(step)
    ]
    seen_s = sum(map(extra_s, seen))
    waits_s = sum(map(waited_s, seen))
    own_s = sum(step.seconds[OTHER] + step.seconds[SAVE] - usual_other_s for step in seen)
    if len(rare) < MIN_RARE or not seen or own_s + waits_s < OF_ITS_OWN * seen_s:
        return None
    rare_s = sum(map(extra_s, rare)) - collection_s
    share = rare_s / sum(step.wall_s for step in after)
    if share <= disturbed_share:
        return None
    return RareWork(
        share=share,
        ms=1e3 * rare_s / len(rare),
        steps=len(rare),
        of_steps=len(after),
        saving_share=sum(step.seconds[SAVE] for step in rare) / rare_s,
        waiting_share=waits_s / seen_s,
    )


def losses_of(steps: Sequence[Step]) -> list[float]:
    """Return the loss of every step that had one."""
    return [sum(step.losses) for step in steps if step.losses]
