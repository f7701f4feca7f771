"""The report of `compare`: two stored results, side by side."""

from flatout.core.contrast import Contrast, Quantity
from flatout.core.units import (
    format_bytes,
    format_interval,
    format_ms,
    format_rate,
    format_ratio,
    format_share,
)
from flatout.reporting.tables import Column, ascii_only, labelled, table, wrapped
from flatout.reporting.words import NOTHING, sentence

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
