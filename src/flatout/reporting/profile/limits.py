"""The section on the ranks of a multi-process training: the spread, who is behind, and in what.

The section on limits: what was measured that no technique can beat on this machine.
"""

import statistics
from collections.abc import Iterator

from flatout.records.profile import Profile
from flatout.records.readings import Limits, RankFacts
from flatout.records.units import (
    format_bytes,
    format_count,
    format_ms,
    format_rate,
    format_ratio,
    format_share,
    with_prefix,
)
from flatout.reporting.tables import Column, labelled, table

LABEL_WIDTH = 11
HIDDEN_STEP_SHARE = 0.001
"""A least step below a thousandth of the step says only that the step is not about products."""
WORDS = {
    "flops_per_step": "operations of a step",
    "gemm_flops_per_s": "peak",
    "loader_samples_per_s": "loader alone",
}
"""What a reader calls a limit that may be missing."""


def limits_lines(profile: Profile, width: int) -> list[str]:
    """Return what the loader and the device could do at most; nothing where that was not asked."""
    if profile.limits is None and not profile.ceilings.is_measured:
        return []
    return [
        line
        for label, text in _rows(profile, profile.limits or Limits())
        for line in labelled(label.ljust(LABEL_WIDTH), text, width)
    ]


def _rows(profile: Profile, limits: Limits) -> Iterator[tuple[str, str]]:
    if profile.ceilings.is_measured:
        yield "measured", "ceilings, by runs with replayed batches beside the script as it is"
    if limits.loader_samples_per_s and profile.samples_per_s:
        yield "loader", _loader(profile, limits.loader_samples_per_s)
    if limits.least_step_ms is not None:
        yield "least step", _least_step(profile, limits)
    least_copy_ms = find_least_copy_ms(profile, limits)
    if least_copy_ms is not None:
        yield "least copy", _least_copy(least_copy_ms, limits)
    missing = [
        f"{WORDS[name]}: {reason}" for name, reason in limits.missing.items() if name in WORDS
    ]
    if missing:
        yield "not known", "; ".join(missing)


def _loader(profile: Profile, rate: float) -> str:
    taken = profile.samples_per_s_per_rank
    who = "one of the ranks" if profile.ranks else "the training"
    if rate <= taken:
        return (
            f"alone {format_rate(rate)} samples/s, no faster than {who} takes them now "
            f"({format_rate(taken)})"
        )
    times = format_ratio(rate / taken)
    return f"alone at most {format_rate(rate)} samples/s, {times} what {who} takes now"


def _least_step(profile: Profile, limits: Limits) -> str:
    flops, rate = limits.flops_per_step or 0.0, limits.gemm_flops_per_s or 0.0
    least_ms, step_ms = limits.least_step_ms or 0.0, profile.step_ms.median
    share = f"; MFU {format_share(profile.mfu)}" if profile.mfu is not None else ""
    text = (
        f"{format_ms(least_ms)}: {format_flops(flops)} at {format_flops(rate)}/s, "
        f"the measured GEMM peak in {limits.gemm_dtype}{share}"
    )
    if least_ms < HIDDEN_STEP_SHARE * step_ms:
        return f"{text} (the step is not about matrix products)"
    if least_ms >= step_ms:
        return f"{text} (faster than that: not all counted operations are really done)"
    return f"{text}, so at most {format_ratio(step_ms / least_ms)}"


def find_least_copy_ms(profile: Profile, limits: Limits) -> float | None:
    """Return what copying a step's batches to the device takes at least; None where none is."""
    count = sum(loader.batch_bytes for loader in profile.training_loaders)
    if profile.device_kind == "cpu" or not limits.copy_bytes_per_s or not count:
        return None
    return 1e3 * count * profile.batches_per_step / limits.copy_bytes_per_s


def _least_copy(least_ms: float, limits: Limits) -> str:
    rate = format_bytes(limits.copy_bytes_per_s or 0.0)
    return f"{format_ms(least_ms)} for a step's batches at {rate}/s, as measured"


def format_flops(count: float) -> str:
    """Render a number of floating-point operations with three significant figures.

    >>> format_flops(3.1e12), format_flops(286_720), format_flops(12)
    ('3.10 TFLOP', '287 kFLOP', '12.0 FLOP')
    """
    value, prefix = with_prefix(count)
    return f"{format_rate(value)} {prefix}FLOP"


MOST = 8
"""Rows: one machine's devices; of more ranks the slowest are shown."""
SHOWN = ("data_wait", "forward", "backward", "optimizer")


def ranks_lines(profile: Profile, width: int) -> list[str]:
    """Return the table of the ranks and the straggler; nothing for a single process."""
    ranks = profile.ranks
    if not ranks:
        return []
    shown = sorted(ranks, key=_own_ms, reverse=True)[:MOST]
    columns = [
        Column("rank"),
        Column("step\nms", is_number=True),
        *(Column(name.replace("_", "\n"), is_number=True) for name in SHOWN),
        Column("in\ncollectives", is_number=True),
        Column("samples/s", is_number=True),
    ]
    rows = [_row(rank) for rank in sorted(shown, key=lambda rank: rank.rank)]
    lines = ["", *table(columns, rows), ""]
    lines += labelled("ranks".ljust(11), _spread(ranks, len(shown)), width)
    for rank in ranks:
        if rank.is_straggler:
            text = f"rank {rank.rank}: {rank.because}"
            lines += labelled("straggler".ljust(11), text, width)
    return lines


def _row(rank: RankFacts) -> list[str]:
    exposed = rank.exposed_communication_ms
    return [
        str(rank.rank),
        f"{rank.step_ms:.1f}",
        *(format_count(rank.phases_ms[name]) for name in SHOWN),
        "not seen" if exposed is None else format_count(exposed),
        format_rate(rank.samples_per_s),
    ]


def _own_ms(rank: RankFacts) -> float:
    return rank.step_ms - (rank.exposed_communication_ms or 0.0)


def _spread(ranks: tuple[RankFacts, ...], shown: int) -> str:
    """Return how far the ranks lie apart, and what they spend on waiting for each other."""
    own = [_own_ms(rank) for rank in ranks]
    text = f"{len(ranks)} processes"
    if shown < len(ranks):
        text += f", the {shown} with most work of their own shown"
    exposed = [rank.exposed_communication_ms for rank in ranks]
    if None in exposed:
        return f"{text}; communication runs on the device: a trace shows it"
    shares = [
        (rank.exposed_communication_ms or 0.0) / rank.step_ms for rank in ranks if rank.step_ms
    ]
    waits = statistics.median(shares)
    return (
        f"{text}; own work {format_ms(min(own))} to {format_ms(max(own))} a step; "
        f"{format_share(waits)} of the median rank's step is spent in collectives"
    )
