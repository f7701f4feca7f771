"""The verb `compare`: two stored results, side by side, for people and for CI gates."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from flatout.core import ablation, profile
from flatout.core.ablation import Ablation, Comparison, ablation_from_json
from flatout.core.contrast import Contrast, Quantity
from flatout.core.errors import UserError
from flatout.core.profile import Profile, profile_from_json

UNCHANGED = Comparison(ratio=1.0, interval=(1.0, 1.0), n=0)
"""The gain of an empty recipe: it is the baseline itself."""
SINGLE_RUNS = (
    "these are single runs without an interval: equal runs of one script in fresh processes "
    "differ by 2 to 7 % by themselves; 'flatout tune' measures in interleaved pairs"
)


def compare(baseline: Mapping[str, Any], candidate: Mapping[str, Any]) -> Contrast:
    """Return what the second of two documents shows against the first.

    Raises:
        UserError: if they are not both profiles or both ablations.
    """
    schemas = (baseline.get("schema"), candidate.get("schema"))
    contrasts: dict[str, Callable[..., Contrast]] = {
        profile.SCHEMA: _of_profiles,
        ablation.SCHEMA: _of_ablations,
    }
    for schema in schemas:
        if schema not in contrasts:
            raise UserError(
                f"cannot compare a document with schema {schema!r}; give two files that "
                "'flatout measure --json' wrote, or two of 'flatout tune --json'"
            )
    if schemas[0] != schemas[1]:
        raise UserError(f"cannot compare {schemas[0]} with {schemas[1]}; give two of the same kind")
    try:
        return contrasts[str(schemas[0])](baseline, candidate)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"a document says {schemas[0]} but does not hold one ({error}); write it anew"
        ) from error


def _of_profiles(plain_a: Mapping[str, Any], plain_b: Mapping[str, Any]) -> Contrast:
    a, b = profile_from_json(plain_a), profile_from_json(plain_b)
    notes = [SINGLE_RUNS, *_differences(a, b)]
    ratio = a.whole_step_ms / b.whole_step_ms
    meaning = "the baseline's speed, by step time"
    if a.samples_per_step != b.samples_per_step and a.samples_per_s and b.samples_per_s:
        ratio = b.samples_per_s / a.samples_per_s
        meaning = "the baseline's speed, by samples/s"
    return Contrast(
        of="profile",
        ratio=ratio,
        meaning=meaning,
        quantities=_quantities(a, b),
        notes=tuple(notes),
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
    if not result.recipe.choices:
        return UNCHANGED
    if result.confirmation is None:
        raise UserError(
            f"the tuning of {result.workload} ended ({result.stopped}) before its recipe was "
            "confirmed; go on with 'flatout tune --resume'"
        )
    return result.confirmation


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
