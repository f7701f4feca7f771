"""The command `compare`: two stored results, side by side, for people and for CI gates."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flatout.records import ablation, profile
from flatout.records.ablation import Ablation, Comparison, Contrast, Quantity, ablation_from_json
from flatout.records.errors import UserError
from flatout.records.profile import Profile, profile_from_json
from flatout.records.statistics import compare_apart, student_quantile
from flatout.records.trial_result import (
    RUN_SCHEMA,
    CurvePoint,
    PrintedValue,
    is_lower_better,
    run_record_from_json,
    seconds_until,
)

UNCHANGED = Comparison(ratio=1.0, interval=(1.0, 1.0), n=0)
"""The gain of an empty recipe: it is the baseline itself."""
CUT_SHORT = ("interrupted", "machine busy")
"""How a tuning ends that found nothing because it was not let."""
FEWEST_PROCESSES = 2
"""One process shows nothing about the noise between processes."""
CONFIDENCE = 0.95
APART = (
    "the two were measured one after the other: what changed on the machine in between is in the "
    "ratio and not in the interval; 'flatout tune' measures in interleaved pairs"
)


def compare(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Contrast:
    """Return what the second of two documents shows against the first.

    Raises:
        UserError: if they are not both profiles, both ablations or both records of runs.
    """
    schemas = (baseline.get("schema"), candidate.get("schema"))
    contrasts: dict[str, Callable[..., Contrast]] = {
        profile.SCHEMA: _of_profiles,
        ablation.SCHEMA: _of_ablations,
        RUN_SCHEMA: _of_runs,
    }
    for schema in schemas:
        if not isinstance(schema, str) or schema not in contrasts:
            raise UserError(
                f"cannot compare a document with schema {schema!r}; give two files that "
                "'flatout measure --json' wrote, or two of 'flatout tune --json' or 'flatout run "
                "--record'"
            )
    if schemas[0] != schemas[1]:
        raise UserError(f"cannot compare {schemas[0]} with {schemas[1]}; give two of the same kind")
    try:
        return contrasts[str(schemas[0])](baseline, candidate)
    except UserError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(
            f"a document says {schemas[0]} but does not hold one ({error}); write it anew"
        ) from error


def _of_profiles(plain_a: Mapping[str, Any], plain_b: Mapping[str, Any]) -> Contrast:
    a, b = profile_from_json(plain_a), profile_from_json(plain_b)
    n = (max(1, len(a.process_steps_ms)), max(1, len(b.process_steps_ms)))
    has_noise = min(n) >= FEWEST_PROCESSES
    notes = [*_distrust(a, b), APART if has_noise else _no_interval(n), *_differences(a, b)]
    pair = compare_apart(a.process_steps_ms, b.process_steps_ms) if has_noise else None
    ratio = pair.ratio if pair else a.whole_step_ms / b.whole_step_ms
    meaning, scale = "the baseline's speed, by step time", 1.0
    if a.samples_per_step != b.samples_per_step and a.samples_per_s and b.samples_per_s:
        by_samples = b.samples_per_s / a.samples_per_s
        if pair is not None:
            by_samples = ratio * b.samples_per_step / a.samples_per_step
        scale, ratio = by_samples / ratio, by_samples
        meaning = "the baseline's speed, by samples/s"
    return Contrast(
        of="profile",
        ratio=ratio,
        meaning=meaning,
        interval=(scale * pair.interval[0], scale * pair.interval[1]) if pair else None,
        n=n,
        quantities=_quantities(a, b),
        notes=tuple(notes),
    )


def _distrust(a: Profile, b: Profile) -> list[str]:
    """Return why one of the two must not be trusted, as its own report said."""
    return [
        f"do not trust the {side}: {why}"
        for side, found in (("baseline", a), ("candidate", b))
        for why in found.invalid
    ]


def _no_interval(n: tuple[int, int]) -> str:
    return (
        f"no interval: that needs {FEWEST_PROCESSES} fresh processes of each, and these results "
        f"hold {n[0]} and {n[1]}; equal runs of one script differ by 2 to 7 % by themselves; "
        "measure with --runs 3, or let 'flatout tune' measure in interleaved pairs"
    )


def _of_ablations(plain_a: Mapping[str, Any], plain_b: Mapping[str, Any]) -> Contrast:
    a, b = ablation_from_json(plain_a), ablation_from_json(plain_b)
    gain_a, gain_b = _gain(a), _gain(b)
    first = Quantity(
        name="gain of the recipe", baseline=gain_a.ratio, candidate=gain_b.ratio, unit="ratio"
    )
    notes = [
        "the gains were each measured against their own baseline in interleaved pairs; the other "
        "numbers come from different times, or machines, and have no interval",
        *_differences(a.baseline, b.baseline),
    ]
    if a.recipe.names != b.recipe.names:
        notes.append(f"recipes: {a.recipe.label} against {b.recipe.label}")
    return Contrast(
        of="ablation",
        ratio=gain_b.ratio / gain_a.ratio,
        meaning="the baseline's gain",
        interval=_interval(gain_a, gain_b),
        n=(gain_a.n, gain_b.n),
        quantities=(first, *_quantities(a.final or a.baseline, b.final or b.baseline)),
        notes=tuple(notes),
    )


def _gain(result: Ablation) -> Comparison:
    """Return the confirmed gain; a recipe that did not hold was given up and gains nothing."""
    if not result.recipe.choices and result.stopped not in CUT_SHORT:
        return UNCHANGED
    if result.confirmation is None:
        raise UserError(
            f"the tuning of {result.workload} ended ({result.stopped}) before its recipe was "
            "confirmed; go on with 'flatout tune --resume'"
        )
    return result.confirmation


def _of_runs(plain_a: Mapping[str, Any], plain_b: Mapping[str, Any]) -> Contrast:
    """Compare two real trainings: speed, loss at the end, metrics, and the time to reach them."""
    a, b = run_record_from_json(plain_a), run_record_from_json(plain_b)
    step_a, step_b = a.ms_per_step, b.ms_per_step
    if step_a is None or step_b is None:
        raise UserError("a run made too few steps to be compared: it has to train for seconds")
    quantities = [
        Quantity(name="time per step", unit="ms", baseline=step_a, candidate=step_b),
        Quantity(name="whole run", unit="s", baseline=a.seconds, candidate=b.seconds),
    ]
    notes = [
        f"the {x} ended with exit code {r.exit_code}"
        for x, r in (("baseline", a), ("candidate", b))
        if r.exit_code
    ]
    ends = _last_tenth(a.points), _last_tenth(b.points)
    if all(ends):
        means = [statistics.fmean(end) for end in ends]
        quantities.append(
            Quantity(name="loss, last tenth", unit="number", baseline=means[0], candidate=means[1])
        )
        notes.append(_loss_note(*ends))
    for name, values in a.printed.items():
        if name in b.printed:
            quantities += _metric(name, values, b.printed[name])
    steps = a.points[-1].step, b.points[-1].step
    if steps[0] != steps[1]:
        notes.append(f"they differ in steps: {steps[0]} against {steps[1]}")
    notes.append(
        "one run each: other seeds give other losses and metrics; repeat both with several seeds "
        "before you call a small difference one"
    )
    return Contrast(
        of="run",
        ratio=step_a / step_b,
        meaning="the baseline's speed, by time per step",
        quantities=tuple(quantities),
        notes=tuple(notes),
    )


def _metric(
    name: str, ours: Sequence[PrintedValue], theirs: Sequence[PrintedValue]
) -> Iterator[Quantity]:
    """Yield what the script printed last, and when each run first had the baseline's last value."""
    target = ours[-1].value
    yield Quantity(name=f"{name}, last", unit="number", baseline=target, candidate=theirs[-1].value)
    lower = is_lower_better(name)
    reached = [seconds_until(values, target, lower=lower) for values in (ours, theirs)]
    if reached[0] and reached[1]:
        yield Quantity(
            name=f"time to {name} {target:.4g}",
            unit="s",
            baseline=reached[0],
            candidate=reached[1],
        )


def _last_tenth(points: Sequence[CurvePoint]) -> list[float]:
    """Return the losses of the last tenth of the steps, at least two."""
    known = [point for point in points if point.loss is not None]
    since = known[-1].step - known[-1].step // 10 if known else 0
    found = [point.loss for point in known if point.step >= since and point.loss is not None]
    return found if len(found) >= 2 else []


def _loss_note(a: Sequence[float], b: Sequence[float]) -> str:
    """Say whether the two ends differ by more than their own points scatter."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    error = math.hypot(*(statistics.stdev(end) / math.sqrt(len(end)) for end in (a, b)))
    limit = student_quantile((1 + CONFIDENCE) / 2, len(a) + len(b) - 2) * error
    words = "is within" if abs(difference) <= limit else "is more than"
    return (
        f"the loss at the end differs by {difference:+.4g}, which {words} what its points scatter "
        f"(+-{limit:.2g}, n={len(a)}+{len(b)})"
    )


def _interval(a: Comparison, b: Comparison) -> tuple[float, float] | None:
    """Return the interval of the quotient: half-widths of independent logs add in squares."""
    widths = [_half_width(pair) for pair in (a, b)]
    if not all(map(math.isfinite, widths)):
        return None
    middle, width = math.log(b.ratio / a.ratio), math.hypot(*widths)
    return math.exp(middle - width), math.exp(middle + width)


def _half_width(pair: Comparison) -> float:
    low, high = pair.interval
    return math.log(high / low) / 2 if low > 0 else math.inf


def _differences(a: Profile, b: Profile) -> list[str]:
    """Return what makes the two hard to compare."""
    notes = []
    for what, one, other in (
        ("device", a.device_name, b.device_name),
        ("samples a step", f"{a.samples_per_step:.6g}", f"{b.samples_per_step:.6g}"),
        ("torch", a.environment.get("torch"), b.environment.get("torch")),
        ("threads", a.cpu_threads, b.cpu_threads),
    ):
        if one != other:
            notes.append(f"they differ in {what}: {one} against {other}")
    return notes


def _quantities(a: Profile, b: Profile) -> tuple[Quantity, ...]:
    """Return the numbers that both profiles have."""
    readings = (
        ("step time", "ms", a.whole_step_ms, b.whole_step_ms),
        ("data wait", "ms", a.phases_ms["data_wait"], b.phases_ms["data_wait"]),
        ("samples/s", "per_s", a.samples_per_s, b.samples_per_s),
        ("device busy", "share", a.device_busy_share, b.device_busy_share),
        (
            "peak memory",
            "bytes",
            float(a.peak_bytes.allocated or a.peak_bytes.device),
            float(b.peak_bytes.allocated or b.peak_bytes.device),
        ),
    )
    return tuple(
        Quantity(name=name, unit=unit, baseline=one, candidate=other)
        for name, unit, one, other in readings
        if one or other
    )
