"""The command `compare`: two stored results, side by side, for people and for CI gates."""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flatout.records import ablation, profile
from flatout.records.ablation import Ablation, Comparison, Contrast, Quantity, ablation_from_json
from flatout.records.errors import UserError
from flatout.records.messages import Sentence, words
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
CUT_SHORT = ("interrupted", "machine busy", "busy budget")
"""How a tuning ends that found nothing because it was not let."""
FEWEST_PROCESSES = 2
"""One process shows nothing about the noise between processes."""
CONFIDENCE = 0.95


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
            f"a document says {schemas[0]} but does not hold one ({error}); write it again"
        ) from error


def _of_profiles(plain_a: Mapping[str, Any], plain_b: Mapping[str, Any]) -> Contrast:
    a, b = profile_from_json(plain_a), profile_from_json(plain_b)
    n = (max(1, len(a.process_steps_ms)), max(1, len(b.process_steps_ms)))
    has_noise = min(n) >= FEWEST_PROCESSES
    notes = [
        *_distrust(a, b),
        words("compare.apart") if has_noise else _no_interval(n),
        *_differences(a, b),
    ]
    pair = compare_apart(a.process_steps_ms, b.process_steps_ms) if has_noise else None
    ratio = pair.ratio if pair else a.whole_step_ms / b.whole_step_ms
    meaning, scale = words("compare.by_step"), 1.0
    if a.samples_per_step != b.samples_per_step and a.samples_per_s and b.samples_per_s:
        by_samples = b.samples_per_s / a.samples_per_s
        if pair is not None:
            by_samples = ratio * b.samples_per_step / a.samples_per_step
        scale, ratio = by_samples / ratio, by_samples
        meaning = words("compare.by_samples")
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
        words("compare.distrust", side=words(f"compare.label_{side}"), why=why)
        for side, found in (("baseline", a), ("candidate", b))
        for why in found.invalid
    ]


def _no_interval(n: tuple[int, int]) -> str:
    fewest, one, other = map(str, (FEWEST_PROCESSES, *n))
    return words("compare.no_interval", fewest=fewest, one=one, other=other)


def _of_ablations(plain_a: Mapping[str, Any], plain_b: Mapping[str, Any]) -> Contrast:
    a, b = ablation_from_json(plain_a), ablation_from_json(plain_b)
    gain_a, gain_b = _gain(a), _gain(b)
    first = _quantity(words("compare.gain"), "ratio", gain_a.ratio, gain_b.ratio)
    notes = [words("compare.gains_apart"), *_differences(a.baseline, b.baseline)]
    if a.recipe.names != b.recipe.names:
        notes.append(words("compare.recipes", one=a.recipe.label, other=b.recipe.label))
    return Contrast(
        of="ablation",
        ratio=gain_b.ratio / gain_a.ratio,
        meaning=words("compare.by_gain"),
        interval=_interval(gain_a, gain_b),
        n=(gain_a.n, gain_b.n),
        quantities=(first, *_quantities(a.final or a.baseline, b.final or b.baseline)),
        notes=tuple(notes),
    )


def _gain(result: Ablation) -> Comparison:
    """Return the confirmed gain; a recipe that did not hold was given up and gains nothing.

    What the script needs to run is part of its baseline.
    """
    is_settled = result.confirmation is not None or result.stopped not in CUT_SHORT
    if len(result.recipe.choices) <= len(result.needed) and is_settled:
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
        _quantity(words("compare.time_per_step"), "ms", step_a, step_b),
        _quantity(words("compare.whole_run"), "s", a.seconds, b.seconds),
    ]
    notes = [
        words("compare.ended", side=words(f"compare.label_{x}"), code=str(r.exit_code))
        for x, r in (("baseline", a), ("candidate", b))
        if r.exit_code
    ]
    ends = _last_tenth(a.points), _last_tenth(b.points)
    if all(ends):
        means = map(statistics.fmean, ends)
        quantities.append(_quantity(words("compare.loss_last"), "number", *means))
        notes.append(_loss_note(*ends))
    for name, values in a.printed.items():
        if name in b.printed:
            quantities += _metric(name, values, b.printed[name])
    steps = a.points[-1].step, b.points[-1].step
    if steps[0] != steps[1]:
        notes.append(_differ("steps", *steps))
    notes.append(words("compare.one_run"))
    return Contrast(
        of="run",
        ratio=step_a / step_b,
        meaning=words("compare.by_time"),
        quantities=tuple(quantities),
        notes=tuple(notes),
    )


def _metric(
    name: str, ours: Sequence[PrintedValue], theirs: Sequence[PrintedValue]
) -> Iterator[Quantity]:
    """Yield what the script printed last, and when each run first had the baseline's last value."""
    target = ours[-1].value
    yield _quantity(words("compare.last", name=name), "number", target, theirs[-1].value)
    lower = is_lower_better(name)
    ours_s, theirs_s = (seconds_until(values, target, lower=lower) for values in (ours, theirs))
    if ours_s and theirs_s:
        what = words("compare.time_to", name=name, value=f"{target:.4g}")
        yield _quantity(what, "s", ours_s, theirs_s)


def _quantity(name: str, unit: str, baseline: float, candidate: float) -> Quantity:
    return Quantity(name=name, unit=unit, baseline=baseline, candidate=candidate)


def _last_tenth(points: Sequence[CurvePoint]) -> list[float]:
    """Return the losses of the last tenth of the steps, at least two."""
    known = [point for point in points if point.loss is not None]
    since = known[-1].step - known[-1].step // 10 if known else 0
    found = [point.loss for point in known if point.step >= since and point.loss is not None]
    return found if len(found) >= 2 else []


def _loss_note(a: Sequence[float], b: Sequence[float]) -> Sentence:
    """Say whether the two ends differ by more than their own points scatter."""
    difference = statistics.fmean(b) - statistics.fmean(a)
    error = math.hypot(*(statistics.stdev(end) / math.sqrt(len(end)) for end in (a, b)))
    limit = student_quantile((1 + CONFIDENCE) / 2, len(a) + len(b) - 2) * error
    return words(
        "compare.loss_within" if abs(difference) <= limit else "compare.loss_apart",
        difference=f"{difference:+.4g}",
        limit=f"{limit:.2g}",
        n=f"{len(a)}+{len(b)}",
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
    facts = (
        ("device", a.device_name, b.device_name),
        ("samples", f"{a.samples_per_step:.6g}", f"{b.samples_per_step:.6g}"),
        ("torch", a.environment.get("torch"), b.environment.get("torch")),
        ("threads", a.cpu_threads, b.cpu_threads),
    )
    return [_differ(what, one, other) for what, one, other in facts if one != other]


def _differ(what: str, one: object, other: object) -> Sentence:
    name = words(f"compare.what_{what}")
    return words("compare.differ", what=name, one=str(one), other=str(other))


def _quantities(a: Profile, b: Profile) -> tuple[Quantity, ...]:
    """Return the numbers that both profiles have."""
    peak_a, peak_b = (float(peak.allocated or peak.device) for peak in (a.peak_bytes, b.peak_bytes))
    readings = (
        ("label.step_time", "ms", a.whole_step_ms, b.whole_step_ms),
        ("phase.data_wait", "ms", a.phases_ms["data_wait"], b.phases_ms["data_wait"]),
        ("compare.samples_per_s", "per_s", a.samples_per_s, b.samples_per_s),
        ("label.device_busy", "share", a.device_busy_share, b.device_busy_share),
        ("label.peak_memory", "bytes", peak_a, peak_b),
    )
    return tuple(
        _quantity(words(name), unit, one, other)
        for name, unit, one, other in readings
        if one or other
    )
