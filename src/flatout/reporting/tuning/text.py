"""The report on one tuning, for a terminal, as Markdown and HTML, and that of `compare`."""

from collections.abc import Mapping, Sequence

from markupsafe import Markup

from flatout.records.ablation import Ablation, Contrast, Quantity
from flatout.records.messages import (
    ENGLISH,
    Messages,
    Sentence,
    Text,
    interval_of,
    messages,
    words,
    written,
)
from flatout.records.recipe import Recipe
from flatout.records.units import (
    format_bytes,
    format_duration,
    format_ms,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.blocks import (
    WORD_COLUMNS,
    Facts,
    Next,
    Section,
    Table,
    columns_of,
    escaped,
    fenced,
    listed,
    markdown_lines,
    report,
    safe,
    terminal_lines,
)
from flatout.reporting.tables import NOTHING, table, wrapped
from flatout.reporting.templates import render
from flatout.reporting.tuning.speedup_chart import LadderRow, ladder_rows, ladder_svg, staged_svg
from flatout.reporting.tuning.staged import staged_section
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
NO_CHANGES: Mapping[str, Sequence[str]] = {}
MOST_OTHERS = 6
"""Techniques that are named below the staged table: two or three lines."""
FORMATS = {
    "ms": format_ms,
    "per_s": format_rate,
    "share": format_share,
    "bytes": format_bytes,
    "ratio": format_ratio,
    "s": format_duration,
    "number": "{:.4g}".format,
}


def render_ablation(
    ablation: Ablation,
    *,
    place: ResultPlace = HERE,
    width: int = 80,
    details: bool = False,
    language: str = ENGLISH,
    with_article: bool = False,
) -> str:
    """Return the report: the answer, the table, what limits now, what to type next.

    Where a recipe was proven, the table is the staged one, and what was not kept is named below it;
    with details both tables are shown. In a narrow terminal a technique takes two rows then.
    """
    say = messages(language)
    rows = ladder_rows(ablation, say)
    section = staged_section(ablation, with_article=with_article)
    staged = terminal_lines(section.blocks, say, width) if section else []
    answer = terminal_lines([headline(ablation)], say, width)
    top = [*answer, "", *terminal_lines([where(ablation)], say, width), ""]
    end = ["", *terminal_lines([Next(command=next_command(ablation, place))], say, width)]
    if details:
        points = (*reasons(ablation), ending(ablation))
        body = [*_lines(rows, say, width), "", *_points(points, say, width)]
        body += ["", *staged] if staged else []
    elif staged:
        room = MOST_LINES - len(top) - len(staged) - 1 - len(end)
        body = [*staged, "", *_below_stages(ablation, rows, say, width, room=room)]
    else:
        body = _short(ablation, rows, say, width, room=MOST_LINES - len(top) - len(end))
    return safe("\n".join([*top, *body, *end]), say) + "\n"


def _points(texts: Sequence[Text], say: Messages, width: int) -> list[str]:
    return terminal_lines([listed(texts)], say, width)


def _below_stages(
    ablation: Ablation, rows: Sequence[LadderRow], say: Messages, width: int, *, room: int
) -> list[str]:
    """Return what limits now, what was not kept, and where the rest is, as far as it fits."""
    others = _not_kept(rows, ablation.recipe)
    named = [
        words("staged.other", technique=name, ratio=row.measured_ratio, verdict=row.verdict)
        if row.measured_ratio != NOTHING
        else words("staged.other_unmeasured", technique=name, verdict=row.verdict)
        for name, row in others[:MOST_OTHERS]
    ]
    if len(others) > MOST_OTHERS:
        named.append(words("staged.more_others", n=str(len(others) - MOST_OTHERS)))
    points: list[Text] = [*[*limits(ablation)][:1], *answers(ablation)]
    points += [words("staged.not_kept", techniques=tuple(named))] if named else []
    points += [ending(ablation)]
    last = _points([words("tuning.more")], say, width)
    while points and len(_points(points, say, width)) + len(last) > room:
        points.pop()
    return [*_points(points, say, width), *last]


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
            several = " + ".join((name, *row.together_with))
            found[" + ".join((label, *row.together_with))] = several, row
    return [*found.values()]


def _short(
    ablation: Ablation, rows: Sequence[LadderRow], say: Messages, width: int, *, room: int
) -> list[str]:
    """Return the table and what limits now; what was kept is shown, the rest where it fits."""
    least = [i for i, row in enumerate(rows) if row.kind != "technique" or row.is_kept]
    first, then = limits(ablation), notes(ablation)
    if any(row.stage == "spread" for row in ablation.rows):
        first, then = then, first  # whether several devices help is what was asked
    points = [*[*first, *then][: MOST_POINTS - 1], ending(ablation)]
    room -= len(table(columns_of(ESSENTIAL, say), [])) + 2  # a blank line, and the last one
    while points and len(least) + len(_points(points, say, width)) > room:
        points.pop()
    told = _points(points, say, width)
    room -= len(told)
    rest_of = {*range(len(rows))} - {*least}
    others = sorted(rest_of, key=lambda i: _shown_first(rows[i], ablation.recipe.names))
    shown = [rows[i] for i in sorted([*least, *others[: max(0, room - len(least))]])]
    room -= len(shown)
    details = []
    for row in shown:
        needed = len(wrapped(row.settings, width, indent="  ")) if row.is_kept else 0
        details.append(row.settings if 0 < needed <= room else "")
        room -= needed if needed <= room else 0
    body = terminal_lines([table_of(shown, ESSENTIAL, details)], say, width)
    hidden = len(rows) - len(shown)
    name = {0: "more", 1: "hidden_one"}.get(hidden, "hidden")
    rest = words(f"tuning.{name}", **({"n": str(hidden)} if hidden > 1 else {}))
    return [*body, "", *told, *_points([rest], say, width)]


def _shown_first(row: LadderRow, recipe: Sequence[str]) -> tuple[bool, float]:
    """Return the key to sort by: rows of the recipe, then what is nearest to a proof."""
    return row.technique not in recipe, -row.whisker[0] if row.whisker else 0.0


def _lines(rows: Sequence[LadderRow], say: Messages, width: int) -> list[str]:
    """Return the table with one line a technique, or two where that is too wide."""
    whole = table_of(rows, EVERYTHING, [row.settings for row in rows])
    lines = terminal_lines([whole], say, width)
    if max(map(len, lines)) <= width:
        return lines
    essential = table_of(rows, ESSENTIAL, [_rest(row, say) for row in rows])
    return terminal_lines([essential], say, width)


def table_of(
    rows: Sequence[LadderRow], columns: Sequence[str], details: Sequence[str] = ()
) -> Table:
    """Return columns of the rows as a block, with a line below each row that has details."""
    came_in = [row.is_kept and row.kind != "baseline" for row in rows]
    return Table(
        columns=tuple(columns),
        rows=tuple(tuple(getattr(row, name) for name in columns) for row in rows),
        kinds=tuple(row.kind + " kept" * kept for row, kept in zip(rows, came_in, strict=True)),
        details=tuple(details),
    )


def _rest(row: LadderRow, say: Messages) -> str:
    """Return what the essential columns leave out, as a phrase; what is unknown is left out."""
    readings = {name: getattr(row, name) for name in READINGS}
    known = [say(f"tuning.{k}", value=value) for k, value in readings.items() if value != NOTHING]
    return ", ".join(filter(None, [row.settings, *known]))


def ablation_markdown(
    ablation: Ablation,
    changes: Mapping[str, Sequence[str]] = NO_CHANGES,
    *,
    place: ResultPlace = HERE,
    language: str = ENGLISH,
) -> str:
    """Return the report: the answer, the table, what it does not show, what to do."""
    say = messages(language)
    columns = (EVERYTHING[0], "settings", *EVERYTHING[1:])
    points = listed((*reasons(ablation), ending(ablation)))
    staged = staged_section(ablation)
    sections = (
        Section(name="tried", blocks=(table_of(ladder_rows(ablation, say), columns),)),
        *((staged,) if staged else ()),
        Section(name="notes", blocks=(points,)),
        Section(name="next", blocks=(Next(command=next_command(ablation, place)),)),
    )
    title = f"# {escaped(say.text(headline(ablation)))}"
    lines = [title, "", escaped(say.text(where(ablation))), ""]
    lines += [line for section in sections for line in markdown_lines(section, say)]
    if any(changes.values()):
        lines += [f"## {say('section.by_hand')}", ""]
        for label, own in changes.items():
            known = fenced("\n".join(own), "diff") if own else [say("tuning.no_instructions")]
            lines += [f"### {escaped(label)}", "", *known, ""]
    return safe("\n".join(lines[:-1]), say) + "\n"


def ablation_html(
    ablation: Ablation,
    changes: Mapping[str, Sequence[str]] = NO_CHANGES,
    *,
    place: ResultPlace = HERE,
    language: str = ENGLISH,
) -> str:
    """Return the page: the answer, the plot, the table, what it does not show, what to do."""
    say = messages(language)
    rows = ladder_rows(ablation, say)
    return render(
        "ladder.html.j2",
        {
            "say": say,
            "headline": headline(ablation),
            "workload": ablation.workload,
            "where": where(ablation),
            # The plots were escaped when they were rendered.
            "plot": Markup(ladder_svg(ablation, language)),  # noqa: S704  made by us
            "words": WORD_COLUMNS,
            "tried": table_of(rows, EVERYTHING, [row.settings for row in rows]),
            "staged": staged_section(ablation),
            "staged_plot": Markup(staged_svg(ablation, language) or ""),  # noqa: S704  made by us
            "reasons": (*reasons(ablation), ending(ablation)),
            "next_command": next_command(ablation, place),
            "changes": changes if any(changes.values()) else {},
        },
    )


def render_contrast(
    contrast: Contrast,
    *,
    baseline: str = "a.json",
    candidate: str = "b.json",
    width: int = 80,
    language: str = ENGLISH,
) -> str:
    """Return the report: the answer, the numbers of both results, how far to trust them."""
    sides = (("baseline", baseline), ("candidate", candidate))
    titles = (words(f"compare.label_{side}") for side, _path in sides)
    blocks = (
        _headline(contrast),
        Facts(rows=sides, labels="compare.label_"),
        Table(columns=("reading", *titles, "change"), rows=tuple(map(_row, contrast.quantities))),
        listed(words("joint.end", text=written(note)) for note in contrast.notes),
    )
    return report(blocks, messages(language), width)


def _headline(contrast: Contrast) -> Sentence:
    n = "+".join(map(str, contrast.n))
    proof = words("compare.proof_none", n=n)
    if contrast.interval is not None:
        proof = words("compare.proof", interval=interval_of(contrast.interval), n=n)
    name = "no_difference" if contrast.covers_one else "difference"
    ratio = format_ratio(contrast.ratio)
    return words(f"compare.{name}", ratio=ratio, meaning=contrast.meaning, proof=proof)


def _row(quantity: Quantity) -> tuple[Text, ...]:
    before, after = quantity.baseline, quantity.candidate
    # A loss or a reward may be below zero: what rises from there is more, not less.
    change = f"{100 * (after - before) / abs(before):+.1f} %" if before else NOTHING
    return (quantity.name, *map(FORMATS[quantity.unit], (before, after)), change)
