"""The report on one tuning as Markdown, for a pull request or a wiki, and as one HTML file.

The page loads nothing from anywhere.
"""

from collections.abc import Sequence

from markupsafe import Markup

from flatout.records.ablation import Ablation
from flatout.records.messages import ENGLISH, messages
from flatout.reporting.blocks import (
    WORD_COLUMNS,
    Facts,
    Next,
    Section,
    escaped,
    fenced,
    markdown_lines,
    safe,
)
from flatout.reporting.templates import render
from flatout.reporting.tuning.speedup_chart import ladder_rows, ladder_svg, staged_svg
from flatout.reporting.tuning.staged import staged_section
from flatout.reporting.tuning.text import EVERYTHING, table_of
from flatout.reporting.tuning.verdict import (
    HERE,
    HandChange,
    ResultPlace,
    ending,
    headline,
    next_command,
    reasons,
    where,
)


def ablation_markdown(
    ablation: Ablation,
    changes: Sequence[HandChange] = (),
    *,
    place: ResultPlace = HERE,
    language: str = ENGLISH,
) -> str:
    """Return the report: the answer, the table, what it does not show, what to do."""
    say = messages(language)
    columns = (EVERYTHING[0], "settings", *EVERYTHING[1:])
    points = Facts(rows=tuple(("", text) for text in (*reasons(ablation), ending(ablation))))
    staged = staged_section(ablation)
    sections = (
        Section(name="tried", blocks=(table_of(ladder_rows(ablation, say), columns),)),
        *((staged,) if staged else ()),
        Section(name="notes", blocks=(points,)),
        Section(name="next", blocks=(Next(command=next_command(ablation, place)),)),
    )
    lines = [
        f"# {escaped(say.text(headline(ablation)))}",
        "",
        escaped(say.text(where(ablation))),
        "",
        *(line for section in sections for line in markdown_lines(section, say)),
    ]
    if any(change.lines for change in changes):
        lines += [f"## {say('section.by_hand')}", ""]
        for change in changes:
            known = fenced("\n".join(change.lines), "diff") if change.lines else []
            known = known or [say("tuning.no_instructions")]
            lines += [f"### {escaped(change.label)}", "", *known, ""]
    return safe("\n".join(lines[:-1]), say) + "\n"


def ablation_html(
    ablation: Ablation,
    changes: Sequence[HandChange] = (),
    *,
    place: ResultPlace = HERE,
    language: str = ENGLISH,
) -> str:
    """Return the page: the answer, the plot, the table, what it does not show, what to do."""
    say = messages(language)
    staged = staged_section(ablation)
    return render(
        "ladder.html.j2",
        {
            "say": say,
            "headline": say.text(headline(ablation)),
            "workload": ablation.workload,
            "where": say.text(where(ablation)),
            # The plots were escaped when they were rendered.
            "plot": Markup(ladder_svg(ablation, language)),  # noqa: S704  made by us
            "columns": EVERYTHING[1:],
            "words": WORD_COLUMNS,
            "rows": ladder_rows(ablation, say),
            "staged": staged.tables[0] if staged else None,
            "staged_plot": Markup(staged_svg(ablation, language) or ""),  # noqa: S704  made by us
            "staged_sentences": [say.text(text) for text in staged.sentences] if staged else (),
            "reasons": [say.text(text) for text in (*reasons(ablation), ending(ablation))],
            "next_command": next_command(ablation, place),
            "changes": changes if any(change.lines for change in changes) else (),
        },
    )
