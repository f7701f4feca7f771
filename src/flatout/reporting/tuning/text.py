"""The report on one tuning on a terminal, and that of `compare` on two stored results."""

from collections.abc import Sequence

from flatout.records.ablation import Ablation, Contrast, Quantity
from flatout.records.messages import ENGLISH, Messages, Sentence, Text, interval_of, messages, words
from flatout.records.recipe import Recipe
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_ms,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.blocks import Facts, Table, columns_of, safe, terminal_lines
from flatout.reporting.tables import (
    NOTHING,
    Column,
    display_width,
    labelled,
    padded,
    sentence,
    table,
    wrapped,
)
from flatout.reporting.tuning.speedup_chart import LadderRow, ladder_rows
from flatout.reporting.tuning.staged import Article, staged_lines, staged_section
from flatout.reporting.tuning.verdict import (
    HERE,
    ResultPlace,
    answers,
    ending,
    headline,
    limits,
    next_command,
    notes,
    reasons,
    where,
)

PROOF = ("technique", "promise", "predicted", "measured_ratio", "interval", "pairs")
READINGS = ("samples_per_s", "device_busy", "peak_memory", "loss_check")
ESSENTIAL = (*PROOF, "verdict")
"""What a reader needs to judge a technique; fits 80 columns. The rest goes on a second line."""
EVERYTHING = (*PROOF, *READINGS, "verdict")
"""One row a technique, for terminals of about 120 columns."""
MOST_LINES = 24
"""Of the short report; the line that names the files makes 25."""
MOST_POINTS = 3
MOST_OTHERS = 6
"""Techniques that are named below the staged table: two or three lines."""


def render_ablation(
    ablation: Ablation,
    *,
    place: ResultPlace = HERE,
    width: int = 80,
    details: bool = False,
    language: str = ENGLISH,
    article: Article | None = None,
) -> str:
    """Return the report: the answer, the table, what limits now, what to type next.

    Where a recipe was proven, the table is the staged one, and what was not kept is named below it;
    with details both tables are shown.

    In a terminal that is narrower than a row, a technique takes two rows of the detailed report.
    """
    say = messages(language)
    rows = ladder_rows(ablation, say)
    section = staged_section(ablation, article)
    staged = staged_lines(section, say, width) if section else []
    top = [
        *terminal_lines(headline(ablation), say, width),
        "",
        *terminal_lines(where(ablation), say, width),
        "",
    ]
    end = ["", f"{say('label.next')}  {next_command(ablation, place)}"]
    if details:
        body = [*_lines(rows, say, width), ""]
        for point in (*reasons(ablation), ending(ablation)):
            body += _point(point, say, width)
        body += ["", *staged] if staged else []
    elif staged:
        room = MOST_LINES - len(top) - len(staged) - 1 - len(end)
        body = [*staged, "", *_below_stages(ablation, rows, say, width, room=room)]
    else:
        body = _short(ablation, rows, say, width, room=MOST_LINES - len(top) - len(end))
    return safe("\n".join([*top, *body, *end]), say) + "\n"


def _point(text: Text, say: Messages, width: int) -> list[str]:
    return terminal_lines(Facts(rows=(("", text),)), say, width)


def _below_stages(
    ablation: Ablation, rows: Sequence[LadderRow], say: Messages, width: int, *, room: int
) -> list[str]:
    """Return what limits now, what was not kept, and where the rest is, as far as it fits."""
    others = _not_kept(rows, ablation.recipe)
    named = tuple(
        words("staged.other", technique=name, ratio=row.measured_ratio, verdict=row.verdict)
        if row.measured_ratio != NOTHING
        else words("staged.other_unmeasured", technique=name, verdict=row.verdict)
        for name, row in others[:MOST_OTHERS]
    )
    more = len(others) - len(named)
    if more:
        named = (*named, words("staged.more_others", n=str(more)))
    points: list[Text] = []
    points += [*[*limits(ablation)][:1], *answers(ablation)]
    points += [words("staged.not_kept", techniques=named)] if named else []
    points += [ending(ablation)]
    last = _point(words("tuning.more"), say, width)
    shown = [_point(text, say, width) for text in points]
    while shown and sum(map(len, shown)) + len(last) > room:
        shown.pop()
    return [*(line for point in shown for line in point), *last]


def _not_kept(rows: Sequence[LadderRow], recipe: Recipe) -> list[tuple[str, LadderRow]]:
    """Return by name what did not come in, each once, with the latest that is known of it.

    What noise hid at first may be in the recipe; so may other settings of what was not kept.
    """
    found: dict[str, tuple[str, LadderRow]] = {}
    for row in rows:
        label = f"{row.technique} {row.settings}".strip()
        is_in = not row.together_with and label in {choice.label for choice in recipe.choices}
        if row.kind == "technique" and not row.is_kept and not is_in:
            name = label if row.technique in recipe.names else row.technique
            found[" + ".join((label, *row.together_with))] = (
                " + ".join((name, *row.together_with)),
                row,
            )
    return [*found.values()]


def _short(
    ablation: Ablation, rows: Sequence[LadderRow], say: Messages, width: int, *, room: int
) -> list[str]:
    """Return the table and what limits now; what was kept is shown, the rest where it fits."""
    least = [i for i, row in enumerate(rows) if row.kind != "technique" or row.is_kept]
    first, then = limits(ablation), notes(ablation)
    if any(row.stage == "spread" for row in ablation.rows):
        first, then = then, first  # whether several devices help is what was asked
    known = [_point(text, say, width) for text in (*first, *then)]
    points = [*known[: MOST_POINTS - 1], _point(ending(ablation), say, width)]
    room -= len(table(columns_of(ESSENTIAL, say), [])) + 2  # a blank line, and the last one
    while points and len(least) + sum(map(len, points)) > room:
        points.pop()
    room -= sum(map(len, points))
    rest_of = {*range(len(rows))} - {*least}
    others = sorted(rest_of, key=lambda i: _shown_first(rows[i], ablation.recipe.names))
    shown = [rows[i] for i in sorted([*least, *others[: max(0, room - len(least))]])]
    room -= len(shown)
    details = []
    for row in shown:
        needed = len(wrapped(row.settings, width, indent="  ")) if row.is_kept else 0
        details.append(row.settings if 0 < needed <= room else "")
        room -= needed if needed <= room else 0
    body = terminal_lines(table_of(shown, ESSENTIAL, details), say, width)
    hidden = len(rows) - len(shown)
    name = {0: "more", 1: "hidden_one"}.get(hidden, "hidden")
    rest = words(f"tuning.{name}", **({"n": str(hidden)} if hidden > 1 else {}))
    return [*body, "", *(line for point in points for line in point), *_point(rest, say, width)]


def _shown_first(row: LadderRow, recipe: Sequence[str]) -> tuple[bool, float]:
    """Return the key to sort by: rows of the recipe, then what is nearest to a proof."""
    return row.technique not in recipe, -row.whisker[0] if row.whisker else 0.0


def _lines(rows: Sequence[LadderRow], say: Messages, width: int) -> list[str]:
    """Return the table with one line a technique, or two where that is too wide."""
    wide = table(
        columns_of(EVERYTHING, say), [[str(getattr(row, c)) for c in EVERYTHING] for row in rows]
    )
    if max(map(len, wide)) <= width:
        return terminal_lines(
            table_of(rows, EVERYTHING, [row.settings for row in rows]), say, width
        )
    details = [_rest(row, say) for row in rows]
    return terminal_lines(table_of(rows, ESSENTIAL, details), say, width)


def table_of(
    rows: Sequence[LadderRow], columns: Sequence[str], details: Sequence[str] = ()
) -> Table:
    """Return columns of the rows as a block, with a line below each row that has details."""
    return Table(
        columns=tuple(columns),
        rows=tuple(tuple(getattr(row, name) for name in columns) for row in rows),
        details=tuple(details),
    )


def _rest(row: LadderRow, say: Messages) -> str:
    """Return what the essential columns leave out, as a phrase; what is unknown is left out."""
    known = [row.settings] if row.settings else []
    for name in READINGS:
        value = getattr(row, name)
        if value != NOTHING:
            known.append(say(f"tuning.{name}", value=value))
    return ", ".join(known)


FORMATS = {
    "ms": format_ms,
    "per_s": format_rate,
    "share": format_share,
    "bytes": format_bytes,
    "ratio": format_ratio,
    "s": format_duration,
    "number": "{:.4g}".format,
}


def render_contrast(
    contrast: Contrast,
    *,
    baseline: str = "a.json",
    candidate: str = "b.json",
    width: int = 80,
    language: str = ENGLISH,
) -> str:
    """Return the report: the answer, the numbers of both results, how far to trust them.

    `baseline` and `candidate`: what the user calls them.
    """
    say = messages(language)
    one, other, change = (say(f"compare.{name}") for name in ("baseline", "candidate", "change"))
    columns = [Column(""), *(Column(title, is_number=True) for title in (one, other, change))]
    size = max(map(display_width, (one, other)))
    lines = [
        *wrapped(say.text(_headline(contrast)), width),
        "",
        *labelled(padded(one, size), baseline, width),
        *labelled(padded(other, size), candidate, width),
        "",
        *table(columns, [_row(quantity, say) for quantity in contrast.quantities]),
        "",
    ]
    for note in contrast.notes:
        lines += wrapped(sentence(say.text(note)), width, indent="- ", hanging="  ")
    return safe("\n".join(lines).rstrip("\n"), say) + "\n"


def _headline(contrast: Contrast) -> Sentence:
    n = "+".join(map(str, contrast.n))
    proof = words("compare.proof_none", n=n)
    if contrast.interval is not None:
        proof = words("compare.proof", interval=interval_of(contrast.interval), n=n)
    name = "no_difference" if contrast.covers_one else "difference"
    ratio = format_ratio(contrast.ratio)
    return words(f"compare.{name}", ratio=ratio, meaning=contrast.meaning, proof=proof)


def _row(quantity: Quantity, say: Messages) -> list[str]:
    write = FORMATS[quantity.unit]
    before, after = quantity.baseline, quantity.candidate
    # A loss or a reward may be below zero: what rises from there is more, not less.
    change = (after - before) / abs(before) if before else None
    return [
        say.text(quantity.name),
        write(quantity.baseline),
        write(quantity.candidate),
        NOTHING if change is None else f"{100 * change:+.1f} %",
    ]
