"""The report of `roofline` as Markdown, for a pull request or a wiki."""

from flatout.core.roofline import Roofline
from flatout.reporting import roofline_words as words
from flatout.reporting.markdown import block, escaped
from flatout.reporting.tables import ascii_only


def roofline_markdown(found: Roofline) -> str:
    """Return the report: the answer, the ceilings, the products, what to change, what to type."""
    lines = [f"# {escaped(words.headline(found))}", ""]
    lines += [f"- {label}: {escaped(text)}" for label, text in words.facts(found)]
    if found.products:
        titles = words.wide_columns(found)
        rule = ["---", "--:", *["---"] * 2, *["--:"] * (len(titles) - 4)]
        body = [[escaped(cell) for cell in row] for row in words.wide_rows(found)]
        lines += ["", *(f"| {' | '.join(cells)} |" for cells in (titles, rule, *body)), ""]
    told = [words.advice_words(advice, found) for advice in found.advice]
    lines += [f"- {escaped(text)}" for text in (*words.beside(found), *told, *found.notes)]
    lines += ["", "Next:", "", *block(words.next_command(found), "sh")]
    return ascii_only("\n".join(lines)) + "\n"
