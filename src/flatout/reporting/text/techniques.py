"""The list of levers."""

from collections.abc import Mapping

from flatout.core.technique import Technique
from flatout.reporting.tables import Column, ascii_only, table, wrapped


def render_techniques(classes: Mapping[str, type[Technique]], *, width: int = 80) -> str:
    """Return the levers with what each addresses, its promise and its one-line summary."""
    order = sorted(classes.items(), key=lambda item: (item[1].numerics.rank, item[0]))
    columns = [Column("lever"), Column("promise"), Column("addresses")]
    cells = [[name, kind.numerics.value, ", ".join(sorted(kind.addresses))] for name, kind in order]
    lines = table(columns, cells)
    head = len(lines) - len(cells)
    shown = [
        *wrapped(f"{len(classes)} levers; each is tried by 'flatout tune' where it fits.", width),
        "",
        *lines[:head],
    ]
    for line, (_name, kind) in zip(lines[head:], order, strict=True):
        summary = (kind.__doc__ or "").partition("\n")[0]
        shown += [line, *wrapped(summary, width, indent="  ")]
    shown += ["", "next  flatout tune train.py"]
    return ascii_only("\n".join(shown)) + "\n"
