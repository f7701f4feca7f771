"""The report on one profile: where a step's time goes and what that could gain."""

import math
from collections.abc import Iterator, Sequence

from flatout.core.finding import Finding
from flatout.core.profile import PHASES, Profile
from flatout.core.units import (
    format_bytes,
    format_ms,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.tables import Column, ascii_only, labelled, table, wrapped
from flatout.reporting.words import PHASE_WORDS, ceilings_words, sentence

WORTH_A_HEADLINE = 0.10
"""A wait below a tenth of the step is not what a reader should look at first."""
BAR_WIDTH = 30
"""Characters for a whole step in the table of phases."""
COMPUTE = ("forward", "backward", "optimizer")


def render_profile(profile: Profile, *, workload: str = "train.py", width: int = 80) -> str:
    """Return the report: the answer, the phases, the readings, the findings, what to type next.

    Args:
        profile: What was measured.
        workload: What the user would type after `python`.
        width: Columns of the terminal.
    """
    device = f"{workload} on {profile.device_name} ({profile.device_kind})"
    lines = [
        *wrapped(headline(profile), width),
        "",
        *wrapped(device, width),
        "",
        *_phases(profile),
        "",
        *(line for label, text in _readings(profile) for line in _reading(label, text, width)),
    ]
    for finding in profile.findings:
        lines += ["", *_finding(finding, width)]
    lines += ["", f"{'next'.ljust(11)}  flatout tune {workload}"]
    return ascii_only("\n".join(lines)) + "\n"


def headline(profile: Profile) -> str:
    """Return the one sentence that answers where the time goes."""
    data, copies = profile.share("data_wait"), profile.share("h2d")
    top = max(profile.findings, key=lambda finding: finding.share, default=None)
    if top and top.share > max(data, copies, WORTH_A_HEADLINE):
        return sentence(top.because)
    if data >= max(copies, WORTH_A_HEADLINE):
        gain = format_ratio(profile.ceilings.free_data)
        return (
            f"{format_share(data)} of each step waits for data; at most {gain} if data were free."
        )
    if copies >= WORTH_A_HEADLINE:
        gain = format_ratio(profile.ceilings.free_copies)
        return (
            f"{format_share(copies)} of each step waits for copies to the device; "
            f"at most {gain} if copies were free."
        )
    return _computing(profile)


def add_up(values: Sequence[float], unit: float) -> list[float]:
    """Round values to multiples of a unit so that their sum stays the rounded sum.

    >>> [round(x, 1) for x in add_up([33.34, 33.33, 33.33], 0.1)]
    [33.4, 33.3, 33.3]
    """
    counts = [math.floor(value / unit) for value in values]
    missing = round(sum(values) / unit) - sum(counts)
    by_remainder = sorted(range(len(values)), key=lambda i: counts[i] - values[i] / unit)
    for i in by_remainder[:missing]:
        counts[i] += 1
    return [count * unit for count in counts]


def _computing(profile: Profile) -> str:
    share = profile.share(*COMPUTE)
    if share < 1 - share:
        gain = format_ratio(profile.ceilings.compute_only)
        return (
            f"{format_share(1 - share)} of each step is spent outside model, optimizer and loader; "
            f"at most {gain} if only computing were left."
        )
    most = max(COMPUTE, key=profile.share)
    return (
        f"{format_share(share)} of each step is computing ({PHASE_WORDS[most]} "
        f"{format_share(profile.share(most))}); data keeps up, "
        f"it waits {format_share(profile.share('data_wait'))} of the step."
    )


def _phases(profile: Profile) -> list[str]:
    """Return the table; both columns add up to their last row as they are printed."""
    total = profile.step_ms.median
    scale, name = _time_unit(total)
    decimals = max(0, 3 - math.ceil(math.log10(max(total * scale, 1.0)))) + 1
    times = add_up([profile.phases_ms[phase] * scale for phase in PHASES], 10.0**-decimals)
    shares = add_up([100 * profile.share(phase) for phase in PHASES], 0.1)
    rows = [
        [PHASE_WORDS[phase], f"{time:.{decimals}f}", f"{share:.1f} %", _bar(share / 100)]
        for phase, time, share in zip(PHASES, times, shares, strict=True)
    ]
    rows.append(["step", f"{sum(times):.{decimals}f}", f"{sum(shares):.1f} %", ""])
    columns = [
        Column("phase"),
        Column(name, is_number=True),
        Column("share", is_number=True),
        Column(""),
    ]
    return table(columns, rows)


def _time_unit(step_ms: float) -> tuple[float, str]:
    """Return the factor from milliseconds and the unit that suits the whole table."""
    if step_ms >= 10_000:
        return 1e-3, "s"
    return (1.0, "ms") if step_ms >= 1 else (1e3, "us")


def _bar(share: float) -> str:
    return "#" * round(share * BAR_WIDTH)


def _readings(profile: Profile) -> Iterator[tuple[str, str]]:
    step = profile.step_ms
    yield (
        "step time",
        f"{format_ms(step.median)} (10th to 90th percentile {format_ms(step.p10)} to "
        f"{format_ms(step.p90)}, n={step.n} steps)",
    )
    if profile.epoch_start_ms and profile.epoch_steps:
        yield (
            "epoch start",
            f"{format_ms(profile.epoch_start_ms)} once in {profile.epoch_steps} steps, "
            "beside the step time",
        )
    if profile.samples_per_s:
        yield (
            "speed",
            f"{format_rate(profile.samples_per_s)} samples/s "
            f"({profile.samples_per_step:.6g} samples a step)",
        )
    yield "device busy", _busy(profile)
    if profile.mfu is not None:
        yield "MFU", format_share(profile.mfu)
    yield "peak memory", _memory(profile)
    yield "losses", _losses(profile)
    yield (
        "warm-up",
        f"{profile.warmup_steps} steps, {format_ms(profile.warmup_ms)}, not counted "
        f"above (first step {format_ms(profile.first_step_ms)})",
    )
    yield (
        "overhead",
        f"{format_share(profile.overhead_share)} of the step is flatout's own listening",
    )
    yield "ceilings", ceilings_words(profile)
    for note in profile.notes:
        yield "note", note


def _busy(profile: Profile) -> str:
    text = format_share(profile.device_busy_share)
    if profile.device_kind == "cpu":
        text += " (share of forward, backward and optimizer)"
    if profile.gpu_util_share is not None:
        text += f" (nvidia-smi says {format_share(profile.gpu_util_share)})"
    return text


def _memory(profile: Profile) -> str:
    peak = profile.peak_bytes
    parts = [
        f"{format_bytes(count)} {name}"
        for name, count in (
            ("allocated", peak.allocated),
            ("reserved", peak.reserved),
            ("held by the process", peak.device),
        )
        if count
    ]
    return ", ".join(parts) or "not known"


def _losses(profile: Profile) -> str:
    if not profile.losses:
        return "none seen"
    first, last = profile.losses[0], profile.losses[-1]
    return f"{first:.4g} first, {last:.4g} last ({len(profile.losses)} steps)"


def _reading(label: str, text: str, width: int) -> list[str]:
    return labelled(label.ljust(11), text, width)


def _finding(finding: Finding, width: int) -> list[str]:
    return [
        *labelled(
            "finding".ljust(11),
            f"{finding.code}, {format_share(finding.share)} of the step: "
            f"{sentence(finding.because)}",
            width,
        ),
        *labelled("what to do".ljust(11), finding.next, width),
    ]
