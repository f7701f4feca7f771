"""The report on one tuning as one HTML file: nothing is loaded from anywhere.

The report on one tuning as Markdown, for a pull request or a wiki.
"""

from collections.abc import Sequence

from markupsafe import Markup

from flatout.records.ablation import Ablation
from flatout.reporting.blocks import escaped, fenced
from flatout.reporting.tables import ascii_only
from flatout.reporting.templates import render
from flatout.reporting.tuning.speedup_chart import LadderRow, ladder_rows, ladder_svg
from flatout.reporting.tuning.verdict import (
    HERE,
    HandChange,
    ResultPlace,
    ending,
    headline,
    next_command,
    reasons,
)

COLUMNS = (
    ("technique", "technique", "---"),
    ("settings", "settings", "---"),
    ("promise", "promise", "---"),
    ("predicted", "predicted", "--:"),
    ("ratio", "ratio", "--:"),
    ("interval", "interval", "--:"),
    ("n", "n", "--:"),
    ("samples/s", "samples_per_s", "--:"),
    ("device busy", "busy", "--:"),
    ("peak memory", "memory", "--:"),
    ("loss check", "loss_check", "---"),
    ("verdict", "verdict", "---"),
)
"""Title, field of `LadderRow`, alignment."""

NOT_KNOWN = "No instructions for this technique: use the recipe."


def ablation_markdown(
    ablation: Ablation,
    changes: Sequence[HandChange] = (),
    *,
    place: ResultPlace = HERE,
) -> str:
    """Return the report: the answer, the table, what it does not show, what to do.

    Args:
        ablation: What the tuning found.
        changes: The recipe by hand.
        place: Where the recipe is, for the next command.
    """
    lines = [
        f"# {escaped(headline(ablation))}",
        "",
        f"{escaped(ablation.workload)} on {escaped(ablation.baseline.device_name)}",
        "",
        *_table(ladder_rows(ablation)),
        "",
        *(f"- {escaped(reason)}" for reason in reasons(ablation)),
        f"- {ending(ablation)}",
        "",
        "Next:",
        "",
        *fenced(next_command(ablation, place), "sh"),
    ]
    if any(change.lines for change in changes):
        lines += ["", "## The same by hand", "", *_by_hand(changes)]
    return ascii_only("\n".join(lines)) + "\n"


def _table(rows: Sequence[LadderRow]) -> list[str]:
    titles = [title for title, _field, _align in COLUMNS]
    body = [[escaped(getattr(row, field)) for _title, field, _align in COLUMNS] for row in rows]
    rule = [align for _title, _field, align in COLUMNS]
    return [f"| {' | '.join(cells)} |" for cells in (titles, rule, *body)]


def _by_hand(changes: Sequence[HandChange]) -> list[str]:
    lines: list[str] = []
    for change in changes:
        lines += [f"### {escaped(change.label)}", ""]
        known = fenced("\n".join(change.lines), "diff") if change.lines else [NOT_KNOWN]
        lines += [*known, ""]
    return lines[:-1]


def ablation_html(
    ablation: Ablation,
    changes: Sequence[HandChange] = (),
    *,
    place: ResultPlace = HERE,
) -> str:
    """Return the page: the answer, the plot, the table, what it does not show, what to do.

    Args:
        ablation: What the tuning found.
        changes: The recipe by hand.
        place: Where the recipe is, for the next command.
    """
    return render(
        "ladder.html.j2",
        {
            "headline": headline(ablation),
            "workload": ablation.workload,
            "device": ablation.baseline.device_name,
            # The plot was escaped when it was rendered.
            "plot": Markup(ladder_svg(ablation)),  # noqa: S704  made by us
            "rows": ladder_rows(ablation),
            "reasons": [*reasons(ablation), ending(ablation)],
            "next_command": next_command(ablation, place),
            "changes": changes if any(change.lines for change in changes) else (),
        },
    )
