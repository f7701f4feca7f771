"""The judge: decides from the records of guard trials whether a recipe trains the same thing."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from statistics import fmean

from flatout.agent.guard.record import AT_STEP, BEFORE_CLIP, UPDATE, GuardRecord
from flatout.guard.differences import (
    Differences,
    Key,
    SetDifference,
    TensorDifference,
    differences,
    excesses,
    update_notes,
)
from flatout.guard.limits import (
    AUTOCAST_CHANGED_NOTHING,
    COLUMNS,
    DEAD_SHARE,
    EARLY_LOSSES,
    NUDGED_FACTOR,
    ROUNDED_FACTOR,
    SHARE_CAP,
    SIZE_LIMIT,
    TF32_COLUMN,
    TURNED_FACTOR,
    UNSTEADY_COLUMN,
    UPDATE_LIMIT,
    Limit,
    PromiseLimits,
)
from flatout.guard.mismatches import Reading, mismatches
from flatout.guard.obstacles import Trials, find_missing, find_obstacle
from flatout.records.ablation import LossCheck
from flatout.records.messages import Sentence, joined, named, words
from flatout.records.technique import Numerics

NAMES = {BEFORE_CLIP: "gradient", AT_STEP: "clipped_gradient", UPDATE: "update"}
"""Names of the checks that look at each tensor."""
POINTS = {BEFORE_CLIP: "before_clipping", AT_STEP: "at_step", UPDATE: "update"}
"""What the messages are called that name what is compared."""
ORDER = ("gradient", "clipped_gradient", "slope", "update", "buffers", "second_gradient", "loss")
"""The checks, the most telling first: a rejection names the first that fired."""
DIVERGED = 1.5
"""A training technique whose last losses exceed the first one by this factor does damage."""
LAST_LOSSES = 5
WIDEST = COLUMNS[Numerics.PRECISION]
"""What `rounding`'s limits are never widened beyond: no fault of the study got through it."""
NOTHING = Differences(sets={}, buffers={}, losses=())
ABSENT = SetDifference(moved=False, tensors={}, together=0.0)
EQUAL = TensorDifference(error=0.0, slope=0.0, share=0.0, is_live=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """What was measured against the baseline, and what is allowed."""

    column: PromiseLimits
    candidate: Differences
    scale: Differences = NOTHING
    noise: Differences = NOTHING
    own: Differences = NOTHING
    """What the script makes of one rounding."""
    nudged: Differences = NOTHING
    """What it makes of other last digits of its inputs and weights."""
    notes: tuple[str, ...] = ()


def judge(trials: Trials) -> LossCheck:
    """Decide whether a candidate trains the same thing as the baseline, up to its promise."""
    if trials.promise is Numerics.TRAINING:
        return _training(trials)
    obstacle = find_obstacle(trials)
    if obstacle is not None:
        return _not_compared(obstacle)
    return _compared(trials)


def aa(baseline: GuardRecord, repeat: GuardRecord) -> LossCheck:
    """Compare the script with itself: `same`, `within` rounding, or `not_compared`."""
    obstacle = find_obstacle(
        Trials(baseline=baseline, candidate=repeat, repeat=repeat, promise=Numerics.EXACT)
    )
    if obstacle is not None:
        return _not_compared(obstacle)
    found = differences(baseline, repeat)
    steps = len(found.losses)
    if found.is_zero:
        return LossCheck(status="same", steps=steps, why=words("guard.repeats", n=str(steps)))
    largest = max(item.largest for item in found.sets.values())
    why = words("guard.repeats_rounding", largest=f"{largest:.1g}")
    return LossCheck(status="within", steps=steps, why=why, worst={"repeat": largest})


def _training(trials: Trials) -> LossCheck:
    """Look for damage only: this promise allows other losses, gradients and samples."""
    record = trials.candidate
    if not record.losses or not record.gradients:
        return _not_compared(words("guard.nothing_shown"))
    if not all(map(math.isfinite, record.losses)):
        return _rejected({"loss": SHARE_CAP}, words("guard.not_finite"))
    first, last = record.losses[0], fmean(record.losses[-LAST_LOSSES:])
    before = trials.baseline.losses
    known = (first, fmean(before[-LAST_LOSSES:])) if before else (first,)
    # From where they are, not times that: a log-likelihood is below zero.
    if last > max(known) + (DIVERGED - 1) * max(map(abs, known)):
        why = words("guard.rises", first=f"{first:.4g}", last=f"{last:.4g}")
        return _rejected({"loss": SHARE_CAP}, why)
    why = words("guard.on_purpose")
    return LossCheck(status="on_purpose", steps=len(record.losses), why=why)


def _compared(trials: Trials) -> LossCheck:
    baseline, candidate = trials.baseline, trials.candidate
    wrong = next(mismatches(baseline, candidate, computed=trials.computed), None)
    if wrong is not None:
        return _rejected({wrong.check: wrong.share}, _said(wrong))
    missing = find_missing(baseline, candidate)
    if missing is not None:
        return _not_compared(missing)
    case = _case(trials)
    readings = [*_readings(case), *_updates(trials)]
    worst: dict[str, float] = {}
    for reading in readings:
        worst[reading.check] = max(worst.get(reading.check, 0.0), reading.share)
    firing = (reading for reading in readings if reading.share > 1)
    fired = sorted(firing, key=lambda reading: (ORDER.index(reading.check), -reading.share))
    if fired:
        others = [name for name in ORDER[1:] if worst.get(name, 0.0) > 1 and name != fired[0].check]
        why = _said(fired[0])
        if others:
            why = joined(why, words("guard.also", checks=tuple(map(_check_name, others))))
        return _rejected(worst, why, candidate)
    return _passed(trials, case, worst, readings)


def _said(found: Reading) -> str:
    """Return a check that fired, and what it saw."""
    return words("joint.because", one=_check_name(found.check), other=found.text)


def _check_name(check: str) -> str:
    return named("guard_check", check)


def _case(trials: Trials) -> _Case:
    baseline = trials.baseline
    scale = differences(baseline, trials.calibration) if trials.calibration else NOTHING
    noise = differences(baseline, trials.repeat) if trials.repeat else NOTHING
    own = differences(baseline, trials.rounded) if trials.rounded else NOTHING
    nudged = differences(baseline, trials.nudged) if trials.nudged else NOTHING
    notes = [*update_notes(baseline, trials.candidate)]
    if not baseline.losses:
        notes.append(words("guard.no_losses"))
    if trials.candidate.errors:
        notes.append(words("guard.probes_failed", error=trials.candidate.errors[0]))
    column = COLUMNS[trials.promise]
    if trials.promise is Numerics.ROUNDING and _is_low_precision(baseline, scale):
        column = COLUMNS[Numerics.PRECISION]
        notes.append(words("guard.bf16_already"))
    elif trials.promise is Numerics.ROUNDING and baseline.tf32:
        column = TF32_COLUMN
        notes.append(words("guard.tf32"))
    if not noise.is_zero:
        column = UNSTEADY_COLUMN if trials.promise is Numerics.EXACT else column
        notes.append(words("guard.unsteady"))
    if trials.rounded is not None:
        notes.append(words("guard.rounded", share=f"{_largest(own):.2g}"))
    if trials.nudged is not None:
        factor = f"{NUDGED_FACTOR:.0f}"
        notes.append(words("guard.nudged", share=f"{_largest(nudged):.2g}", factor=factor))
    return _Case(
        column=column,
        candidate=differences(baseline, trials.candidate),
        scale=scale,
        noise=noise,
        own=own,
        nudged=nudged,
        notes=tuple(notes),
    )


def _largest(found: Differences) -> float:
    return max((item.together for item in found.sets.values()), default=0.0)


def _is_low_precision(baseline: GuardRecord, scale: Differences) -> bool:
    """Return whether bf16 autocast says nothing about this script because it is there already."""
    first = [item.median for item in scale.sets.values() if not item.moved]
    return baseline.low_precision or all(value < AUTOCAST_CHANGED_NOTHING for value in first)


def _passed(
    trials: Trials, case: _Case, worst: dict[str, float], readings: list[Reading]
) -> LossCheck:
    steps = len(case.candidate.losses)
    is_same = case.candidate.is_zero and steps == len(trials.baseline.losses)
    if is_same:
        why = words("guard.same", n=str(steps))
    else:
        nearest = max(readings, key=lambda r: r.share)
        share = f"{nearest.share:.2g}"
        why = words("guard.inside", n=str(steps), nearest=nearest.text, share=share)
    return LossCheck(
        status="same" if is_same else "within",
        why=joined(why, *case.notes),
        steps=steps,
        worst=worst,
    )


def _readings(case: _Case) -> Iterator[Reading]:
    references = (case.scale, case.noise, case.own, case.nudged)
    for key, found in case.candidate.sets.items():
        scale, noise, own, nudged = (x.sets.get(key, ABSENT) for x in references)
        if case.own.sets:
            yield _size(key, found, own)
        if not found.moved or key[1] == 1:
            yield from _tensors(case.column, key, found, (scale, noise, own, nudged))
        if found.moved:
            norms = (scale.together, noise.together, own.together, nudged.together)
            limit = _limit(case.column.second, WIDEST.second, *norms)
            about = {"what": _name(key)}
            yield _reading("second_gradient", "differs", found.together, limit, **about)
    for name, value in case.candidate.buffers.items():
        seen = (x.buffers.get(name, 0.0) for x in references)
        limit = _limit(case.column.buffers, WIDEST.buffers, *seen)
        yield _reading("buffers", "buffer_differs", value, limit, name=name)
    yield from _loss(case)


def _limit(
    limit: Limit, widest: Limit, scale: float, noise: float, own: float, nudged: float
) -> float:
    """Return what is allowed: a script that amplifies rounding widens it, to `widest` at most.

    >>> rounding, precision = COLUMNS[Numerics.ROUNDING].loss, WIDEST.loss
    >>> [_limit(rounding, precision, 0.0, 0.0, 0.0, nudged) for nudged in (0.0, 0.5)]
    [0.0001, 0.001]
    """
    widened = min(NUDGED_FACTOR * nudged, widest.of(scale, 0.0))
    return max(limit.of(scale, noise, own), widened)


def _reading(check: str, code: str, value: float, limit: float, /, **about: str) -> Reading:
    """Return what was compared, how far it is off, and what is allowed."""
    text = words(f"guard.{code}", **about, value=f"{value:.2g}", limit=f"{limit:.2g}")
    return Reading(check=check, share=_share(value, limit), text=text)


def _size(key: Key, found: SetDifference, own: SetDifference) -> Reading:
    """Compare how large the whole gradient is, where its direction says little."""
    limit = max(SIZE_LIMIT, ROUNDED_FACTOR * abs(own.size))
    check = "second_gradient" if found.moved else NAMES[key[2]]
    seen = _reading(check, "larger", 1 + found.size, limit, what=_name(key))
    return replace(seen, share=_share(abs(found.size), limit))


def _tensors(
    column: PromiseLimits,
    key: Key,
    found: SetDifference,
    references: tuple[SetDifference, SetDifference, SetDifference, SetDifference],
) -> Iterator[Reading]:
    """Compare tensor by tensor, alongside calibration, repeat, rounded and nudged inputs."""
    scale, noise, own, nudged = references
    check, is_exact = NAMES[key[2]], column.gradient.factor == 0
    gradient = column.gradient
    if found.moved and not is_exact:
        gradient = WIDEST.gradient
    middle, what = scale.median, _name(key)
    for name, tensor in found.tensors.items():
        usual, natural, rounded = (x.tensors.get(name, EQUAL) for x in (noise, scale, own))
        if not tensor.is_live and not (is_exact and usual.error == 0.0):
            text = words("guard.dead", name=name, share=f"{tensor.share:.2g}")
            yield Reading(check=check, share=_share(tensor.share, DEAD_SHARE), text=text)
            continue
        # One repeat may hit or miss a tensor of few numbers by chance: none is taken to repeat
        # better than half of them do. A single ReLU that a last digit switches moves its tensor a
        # thousand times as far as the others, and which one that is, is chance: the largest counts
        # for each.
        calibrated, repeated = max(natural.error, middle), max(usual.error, noise.median)
        seen = (calibrated, repeated, rounded.error, nudged.largest)
        limit = _limit(gradient, WIDEST.gradient, *seen)
        yield _reading(check, "tensor_differs", tensor.error, limit, what=what, name=name)
        if column.slope is not None and not found.moved:
            # Where rounding alone turns the gradient round, its slope says nothing.
            limit = column.slope.of(abs(natural.slope), abs(usual.slope))
            limit = max(limit, TURNED_FACTOR * rounded.error)
            scaled = f"{1 + tensor.slope:.4g}"
            limited = f"{limit:.2g}"
            text = words("guard.scaled", what=what, name=name, value=scaled, limit=limited)
            yield Reading(check="slope", share=_share(abs(tensor.slope), limit), text=text)


def _loss(case: _Case) -> Iterator[Reading]:
    """Compare the first losses by the promise, later ones by the band of bf16.

    Training amplifies rounding on its own (a ResNet by four orders of magnitude in five steps), so
    that another order of summation soon differs like another precision. So does an exact promise
    where the script itself repeats up to rounding only.
    """
    is_strict = case.column.gradient.factor == 0 and case.noise.is_zero
    for number, value in enumerate(case.candidate.losses):
        is_late = number >= EARLY_LOSSES
        column = WIDEST if is_late and not is_strict else case.column
        seen = (case.noise, case.nudged)
        noise, nudged = (x.later_loss if is_late else x.early_loss for x in seen)
        limit = _limit(column.loss, WIDEST.loss, case.scale.loss, noise, 0.0, nudged)
        yield _reading("loss", "loss_differs", value, limit, n=str(number + 1))


def _updates(trials: Trials) -> Iterator[Reading]:
    for update, name, value in excesses(trials.baseline, trials.candidate):
        about = {"n": str(update.step), "name": name, "value": f"{value:.2g}"}
        text = words("guard.update_off", **about)
        yield Reading(check="update", share=_share(value, UPDATE_LIMIT), text=text)


def _name(key: Key) -> Sentence:
    point = words(f"guard.point_{POINTS[key[2]]}")
    return point if key[1] == 1 else words("guard.point_later", n=str(key[1]), point=point)


def _share(value: float, limit: float) -> float:
    """Return a value over its limit, capped.

    >>> _share(0.5, 2.0), _share(0.0, 0.0), _share(1e-9, 0.0)
    (0.25, 0.0, 1000000.0)
    """
    if value == 0.0:
        return 0.0
    if not math.isfinite(value) or limit == 0.0:
        return SHARE_CAP
    return min(value / limit, SHARE_CAP)


def _not_compared(why: str) -> LossCheck:
    return LossCheck(status="not_compared", why=why)


def _rejected(worst: dict[str, float], why: str, candidate: GuardRecord | None = None) -> LossCheck:
    steps = len(candidate.losses) if candidate is not None else 0
    return LossCheck(status="rejected", why=why, steps=steps, worst=worst)
