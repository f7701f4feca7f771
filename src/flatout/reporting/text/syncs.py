"""The section on the lines that make the host wait for the device."""

from flatout.core.profile import Profile
from flatout.core.units import format_ms
from flatout.reporting.tables import Column, labelled, table

LABEL_WIDTH = 11
MAX_LINES = 6
"""Lines shown; JSON and HTML have more."""
ON_CPU = "nothing to wait for on the CPU; on a GPU each of these would stop the host"


def syncs_lines(profile: Profile, width: int) -> list[str]:
    """Return the table of the waits; nothing where none was seen."""
    syncs = profile.syncs
    if not syncs:
        return []
    columns = [
        Column("the host waits at"),
        Column("for"),
        Column("per step", is_number=True),
        Column("cost", is_number=True),
    ]
    rows = [
        [
            sync.line or "a line that is not known",
            sync.what,
            f"{sync.per_step:.3g}",
            "-" if sync.ms_per_step is None else format_ms(sync.ms_per_step),
        ]
        for sync in syncs[:MAX_LINES]
    ]
    lines = ["", *table(columns, rows)]
    if len(syncs) > MAX_LINES:
        text = f"{len(syncs) - MAX_LINES} more lines are in the JSON"
        lines += labelled("more".ljust(LABEL_WIDTH), text, width)
    if profile.device_kind == "cpu":
        lines += labelled("waits".ljust(LABEL_WIDTH), ON_CPU, width)
    return lines
