"""The report of `roofline`: the device's ceilings, and the products of a step below them."""

from collections.abc import Sequence

from flatout.core.roofline import Roofline
from flatout.reporting import roofline_words as words
from flatout.reporting.tables import Column, ascii_only, labelled, table, wrapped

LABEL_WIDTH = 9
NUMBERS_FROM = 3
"""The first column of the table that holds numbers."""


def render_roofline(found: Roofline, *, width: int = 80) -> str:
    """Return the report: the answer, the ceilings, the products, what to change, what to type."""
    lines = [*wrapped(words.headline(found), width), ""]
    for label, text in words.facts(found):
        lines += labelled(label.ljust(LABEL_WIDTH), text, width)
    if found.products:
        lines += ["", *_products(found)]
    for text in words.beside(found):
        lines += wrapped(text, width)
    told = [words.advice_words(advice, found) for advice in found.advice]
    lines += _listed("what would change it", told, width)
    lines += _listed("to know", found.notes, width)
    lines += ["", *labelled("next", words.next_command(found), width)]
    return ascii_only("\n".join(lines)) + "\n"


def _listed(title: str, texts: Sequence[str], width: int) -> list[str]:
    lines = ["", title] if texts else []
    for text in texts:
        lines += wrapped(text, width, indent="- ", hanging="  ")
    return lines


def _products(found: Roofline) -> list[str]:
    columns = [
        Column(title, is_number=number >= NUMBERS_FROM)
        for number, title in enumerate(words.columns(found))
    ]
    return table(columns, words.rows(found))
