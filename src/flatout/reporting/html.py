"""The report on one tuning as one HTML file: nothing is loaded from anywhere."""

from collections.abc import Sequence

from markupsafe import Markup

from flatout.core.ablation import Ablation
from flatout.reporting.ladder import ladder_svg
from flatout.reporting.ladder_rows import ladder_rows
from flatout.reporting.patch import HandChange
from flatout.reporting.templates import render
from flatout.reporting.verdict import HERE, Place, ending, headline, next_command, reasons


def ablation_html(
    ablation: Ablation,
    changes: Sequence[HandChange] = (),
    *,
    place: Place = HERE,
) -> str:
    """Return the page: the answer, the plot, the table, what it does not show, what to do.

    Args:
        ablation: What the tuning found.
        changes: The recipe by hand.
        place: Where the recipe lies, for the next command.
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
