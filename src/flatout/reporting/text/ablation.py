"""The report on one tuning: the table of levers, and what it means."""

from flatout.core.ablation import Ablation
from flatout.reporting.ladder_rows import LadderRow, ladder_rows
from flatout.reporting.tables import Column, ascii_only, table, wrapped
from flatout.reporting.verdict import HERE, Place, ending, headline, next_command, reasons
from flatout.reporting.words import NOTHING

ESSENTIAL = (
    Column("lever"),
    Column("promise"),
    Column("predicted", is_number=True),
    Column("ratio", is_number=True),
    Column("interval", is_number=True),
    Column("n", is_number=True),
    Column("verdict"),
)
"""What a reader needs to judge a lever; fits 80 columns. The rest goes on a second line."""
EVERYTHING = (
    Column("lever"),
    Column("promise"),
    Column("predicted", is_number=True),
    Column("ratio", is_number=True),
    Column("interval", is_number=True),
    Column("n", is_number=True),
    Column("samples\nper s", is_number=True),
    Column("device\nbusy", is_number=True),
    Column("peak\nmemory", is_number=True),
    Column("loss\ncheck"),
    Column("verdict"),
)
"""One row a lever, for terminals of about 120 columns."""


def render_ablation(ablation: Ablation, *, place: Place = HERE, width: int = 80) -> str:
    """Return the report: the answer, the table, what it does not show, what to type next.

    Args:
        ablation: What the tuning found.
        place: Where the recipe lies, for the next command.
        width: Columns of the terminal. Below what one row needs, a lever takes two rows.
    """
    lines = [
        *wrapped(headline(ablation), width),
        "",
        *wrapped(f"{ablation.workload} on {ablation.baseline.device_name}", width),
        "",
        *_table(ladder_rows(ablation), width),
        "",
    ]
    for reason in reasons(ablation):
        lines += wrapped(reason, width, indent="- ", hanging="  ")
    lines += wrapped(ending(ablation), width, indent="- ", hanging="  ")
    lines += ["", f"next  {next_command(ablation, place)}"]
    return ascii_only("\n".join(lines)) + "\n"


def _table(rows: tuple[LadderRow, ...], width: int) -> list[str]:
    """Return the table with everything in one line a lever, or in two where that is too wide."""
    lines = table(EVERYTHING, [_everything(row) for row in rows])
    if max(map(len, lines)) <= width:
        seconds = [row.settings for row in rows]
    else:
        lines = table(ESSENTIAL, [_essential(row) for row in rows])
        seconds = [_rest(row) for row in rows]
    head = len(lines) - len(rows)
    together = lines[:head]
    for line, second in zip(lines[head:], seconds, strict=True):
        together += [line, *wrapped(second, width, indent="  ")]
    return together


def _essential(row: LadderRow) -> list[str]:
    return [row.lever, row.promise, row.predicted, row.ratio, row.interval, row.n, row.verdict]


def _everything(row: LadderRow) -> list[str]:
    costs = [row.samples_per_s, row.busy, row.memory, row.loss_check]
    return [*_essential(row)[:-1], *costs, row.verdict]


def _rest(row: LadderRow) -> str:
    """Return what the essential columns leave out, as a phrase; what is unknown is left out."""
    known = [
        (row.settings, ""),
        (row.samples_per_s, " samples/s"),
        (row.busy, " busy"),
        (row.memory, " peak"),
        (row.loss_check, ""),
    ]
    return ", ".join(value + unit for value, unit in known if value not in ("", NOTHING))
