"""The report of `compare`: two stored results, side by side.

The report on one tuning: the table of techniques, and what it means.
"""

from flatout.records.ablation import Ablation, Contrast, Quantity
from flatout.records.units import (
    format_bytes,
    format_interval,
    format_ms,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.tables import NOTHING, Column, ascii_only, labelled, sentence, table, wrapped
from flatout.reporting.tuning.speedup_chart import LadderRow, ladder_rows
from flatout.reporting.tuning.verdict import (
    HERE,
    ResultPlace,
    ending,
    headline,
    limits,
    next_command,
    reasons,
)

ESSENTIAL = (
    Column("technique"),
    Column("promise"),
    Column("predicted", is_number=True),
    Column("ratio", is_number=True),
    Column("interval", is_number=True),
    Column("n", is_number=True),
    Column("verdict"),
)
"""What a reader needs to judge a technique; fits 80 columns. The rest goes on a second line."""
EVERYTHING = (
    Column("technique"),
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
"""One row a technique, for terminals of about 120 columns."""


MOST_LINES = 24
"""Of the short report; the line that names the files makes 25."""
MOST_POINTS = 3


def render_ablation(
    ablation: Ablation, *, place: ResultPlace = HERE, width: int = 80, details: bool = False
) -> str:
    """Return the report: the answer, the table, what limits now, what to type next.

    Args:
        ablation: What the tuning found.
        place: Where the recipe is, for the next command.
        width: Columns of the terminal. Below what one row needs, a technique takes two rows of the
            detailed report.
        details: Whether to show every row with its readings, and everything the table cannot say.
    """
    top = [
        *wrapped(headline(ablation), width),
        "",
        *wrapped(f"{ablation.workload} on {ablation.baseline.device_name}", width),
        "",
    ]
    end = ["", f"next  {next_command(ablation, place)}"]
    if details:
        points = [*reasons(ablation), ending(ablation)]
        body = [*_table(ladder_rows(ablation), width), ""]
        body += [line for point in points for line in _point(point, width)]
    else:
        body = _short(ablation, width, room=MOST_LINES - len(top) - len(end))
    return ascii_only("\n".join([*top, *body, *end])) + "\n"


def _point(text: str, width: int) -> list[str]:
    return wrapped(text, width, indent="- ", hanging="  ")


def _short(ablation: Ablation, width: int, *, room: int) -> list[str]:
    """Return the table and what limits now; what was kept is shown, the rest where it fits."""
    rows = ladder_rows(ablation)
    least = [i for i, row in enumerate(rows) if row.kind != "technique" or row.is_kept]
    notes = map(sentence, ablation.notes)
    points = [
        *[_point(text, width) for text in (*limits(ablation), *notes)][: MOST_POINTS - 1],
        _point(ending(ablation), width),
    ]
    room -= len(table(ESSENTIAL, [])) + 2  # a blank below the table, and the line on the rest
    while points and len(least) + sum(map(len, points)) > room:
        points.pop()
    room -= sum(map(len, points))
    others = [i for i in range(len(rows)) if i not in least][: max(0, room - len(least))]
    shown = [rows[i] for i in sorted([*least, *others])]
    room -= len(shown)
    lines = table(ESSENTIAL, [_essential(row) for row in shown])
    body = lines[: len(lines) - len(shown)]
    for line, row in zip(lines[len(body) :], shown, strict=True):
        settings = wrapped(row.settings, width, indent="  ") if row.is_kept else []
        fits = len(settings) <= room
        room -= len(settings) * fits
        body += [line, *settings * fits]
    hidden = len(rows) - len(shown)
    rest = f"{hidden} more techniques were not kept; " * bool(hidden)
    rest += "report.md and --details have the reasons."
    return [*body, "", *(line for point in points for line in point), *_point(rest, width)]


def _table(rows: tuple[LadderRow, ...], width: int) -> list[str]:
    """Return the table with one line a technique, or two where that is too wide."""
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
    return [row.technique, row.promise, row.predicted, row.ratio, row.interval, row.n, row.verdict]


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


FORMATS = {
    "ms": format_ms,
    "per_s": format_rate,
    "share": format_share,
    "bytes": format_bytes,
    "ratio": format_ratio,
}


def render_contrast(
    contrast: Contrast, *, baseline: str = "a.json", candidate: str = "b.json", width: int = 80
) -> str:
    """Return the report: the answer, the numbers of both results, how far to trust them.

    Args:
        contrast: The two results.
        baseline: What the user calls the first one.
        candidate: What the user calls the second one.
        width: Columns of the terminal.
    """
    columns = [Column("")] + [
        Column(title, is_number=True) for title in ("baseline", "candidate", "change")
    ]
    lines = [
        *wrapped(_headline(contrast), width),
        "",
        *labelled("baseline ", baseline, width),
        *labelled("candidate", candidate, width),
        "",
        *table(columns, [_row(quantity) for quantity in contrast.quantities]),
        "",
    ]
    for note in contrast.notes:
        lines += wrapped(sentence(note), width, indent="- ", hanging="  ")
    return ascii_only("\n".join(lines).rstrip("\n")) + "\n"


def _headline(contrast: Contrast) -> str:
    ratio, proof = format_ratio(contrast.ratio), _proof(contrast)
    if contrast.covers_one:
        return f"No difference that could be shown: {ratio} {contrast.meaning} {proof}."
    return f"{ratio} {contrast.meaning} {proof}."


def _proof(contrast: Contrast) -> str:
    n = "+".join(map(str, contrast.n))
    if contrast.interval is None:
        return f"(no interval, n={n})"
    return f"(95% interval {format_interval(*contrast.interval)}, n={n})"


def _row(quantity: Quantity) -> list[str]:
    write = FORMATS[quantity.unit]
    change = quantity.candidate / quantity.baseline - 1 if quantity.baseline else None
    return [
        quantity.name,
        write(quantity.baseline),
        write(quantity.candidate),
        NOTHING if change is None else f"{100 * change:+.1f} %",
    ]
