"""The section on the ranks of a multi-process training: the spread, who is behind, and in what."""

import statistics

from flatout.core.profile import Profile
from flatout.core.readings import RankFacts
from flatout.core.units import format_count, format_ms, format_rate, format_share
from flatout.reporting.tables import Column, labelled, table

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
