"""When the guard must not judge: it fails closed, and says why."""

from collections.abc import Iterator, Set
from dataclasses import dataclass

import numpy as np

from flatout.agent.guard.record import GuardRecord
from flatout.guard.differences import (
    Differences,
    by_key,
    differences,
    find_update_obstacle,
    is_finite,
)
from flatout.guard.limits import MAX_REPEAT
from flatout.guard.mismatches import computed_arguments, computed_late, has_samples, mismatches
from flatout.records.messages import named, words
from flatout.records.technique import Numerics


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trials:
    """The records that one judgement is on."""

    baseline: GuardRecord
    candidate: GuardRecord
    calibration: GuardRecord | None = None
    """Of the script under bf16 autocast and nothing else: each tensor's natural scale. An exact
    promise alone does without it."""
    repeat: GuardRecord | None = None
    """Of the untouched script once more; None takes it for bit-identical."""
    promise: Numerics
    """The strictest that covers every technique of the recipe."""
    changes_threads: bool = False
    rounded: GuardRecord | None = None
    """Of the untouched script with its inputs and weights rounded to bf16; lifts the ceilings."""
    nudged: GuardRecord | None = None
    """Of the same with the last digits of these numbers moved; widens the limits of `rounding`."""

    @property
    def computed(self) -> set[tuple[str, str]]:
        """The root arguments and late settings that the training itself computes."""
        found: set[tuple[str, str]] = set()
        for record in (self.calibration, self.repeat):
            if record is not None:
                found |= computed_arguments(self.baseline, record)
                found |= computed_late(self.baseline, record)
        return found


def find_obstacle(trials: Trials) -> str | None:
    """Return why nothing can be compared, None when everything needed is there."""
    return next(_obstacles(trials), None)


def find_missing(baseline: GuardRecord, candidate: GuardRecord) -> str | None:
    """Return what the recipe's trial did not show though the baseline's did, None if nothing."""
    missing = by_key(baseline).keys() - by_key(candidate).keys()
    if missing:
        optimizer, step, _ = min(missing)
        return words("guard.no_gradient", n=str(step), optimizer=str(optimizer))
    if len(candidate.losses) < min(2, len(baseline.losses)):
        return words("guard.few_losses")
    return find_update_obstacle(baseline, candidate)


def _obstacles(trials: Trials) -> Iterator[str]:
    computed = trials.computed
    yield from _environment(trials)
    yield from _baseline(trials.baseline)
    if trials.repeat is not None and (wrong := find_drift(trials.baseline, trials.repeat)):
        yield words("guard.not_repeating", why=wrong)
    if not has_samples(trials.baseline, computed):
        yield words("guard.no_samples")
    if trials.promise in (Numerics.ROUNDING, Numerics.PRECISION):
        yield from _calibration(trials.baseline, trials.calibration, computed)


def _environment(trials: Trials) -> Iterator[str]:
    ours, theirs = trials.baseline, trials.candidate
    if ours.torch != theirs.torch:
        yield words("guard.other_torch", one=ours.torch, other=theirs.torch)
    if ours.device != theirs.device:
        yield words("guard.other_device", one=ours.device, other=theirs.device)
    if ours.threads != theirs.threads and not trials.changes_threads:
        yield words("guard.other_threads", n=str(theirs.threads), was=str(ours.threads))


def _baseline(record: GuardRecord) -> Iterator[str]:
    if not record.gradients:
        yield words("guard.no_gradients")
    if max((item.step for item in record.gradients), default=0) < 2:
        yield words("guard.few_steps")
    if not all(is_finite(item.sketches) for item in record.gradients):
        yield words("guard.gradients_not_finite")
    if not all(np.isfinite(record.losses)):
        yield words("guard.losses_not_finite")
    own = differences(record, record)
    live = any(t.is_live for item in own.sets.values() for t in item.tensors.values())
    if record.gradients and not live:
        yield words("guard.all_zero")


def _calibration(
    baseline: GuardRecord, record: GuardRecord | None, computed: Set[tuple[str, str]]
) -> Iterator[str]:
    if record is None:
        yield words("guard.calibration_failed")
        return
    wrong = next(mismatches(baseline, record, computed=computed), None)
    if wrong is not None:
        yield words("guard.calibration_other", why=wrong.text)
    if by_key(record).keys() < by_key(baseline).keys():
        yield words("guard.calibration_short")
    if not all(is_finite(item.sketches) for item in record.gradients):
        yield words("guard.calibration_not_finite")


def find_drift(baseline: GuardRecord, repeat: GuardRecord) -> str | None:
    """Return how a script differs from itself beyond rounding, None when it repeats."""
    computed = computed_late(baseline, repeat)
    if baseline.samples:
        computed |= computed_arguments(baseline, repeat)
    wrong = next(mismatches(baseline, repeat, computed=computed), None)
    if wrong is not None:
        return wrong.text
    if by_key(baseline).keys() != by_key(repeat).keys():
        return words("guard.other_steps")
    found = differences(baseline, repeat)
    for name, value in _noise(found).items():
        if not value <= MAX_REPEAT[name]:
            check = named("guard_check", name.replace(" ", "_"))
            return words("guard.repeat_differs", name=check, value=f"{value:.2g}")
    return None


def _noise(found: Differences) -> dict[str, float]:
    first = (item.largest for item in found.sets.values() if not item.moved)
    return {
        "gradient": max(first, default=0.0),
        "loss": found.early_loss,
        "later loss": found.later_loss,
        "buffers": max(found.buffers.values(), default=0.0),
    }
