"""Plain tables for a terminal: aligned columns, no colour, no borders; wide letters count two."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len

NOTHING = "-"
"""Stands for a number that does not exist, so that no cell is empty by accident."""
GAP = 2
"""Blanks between columns."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    title: str
    """May have several lines; they stand at the bottom of the header."""
    is_number: bool = False
    """Numbers are aligned to the right."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table: header, rule, rows.

    >>> for line in table([Column("phase"), Column("time", is_number=True)], [["h2d", "9"]]):
    ...     print(line)
    phase  time
    -----------
    h2d       9
    """
    titles = [column.title.split("\n") for column in columns]
    height = max(map(len, titles))
    header = list(zip(*([""] * (height - len(lines)) + lines for lines in titles), strict=True))
    widths = [max(map(cell_len, cells)) for cells in zip(*header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        filled = [
            padded(cell, width, is_number=column.is_number)
            for column, cell, width in zip(columns, cells, widths, strict=True)
        ]
        return (" " * GAP).join(filled).rstrip()

    rule = "-" * (sum(widths) + GAP * (len(widths) - 1))
    return [*map(line, header), rule, *map(line, rows)]


def wrapped(text: str, width: int, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return the lines of a text within a width; words longer than that stay whole.

    >>> wrapped("one two three", 9, indent="  ")
    ['  one two', '  three']
    """
    # textwrap would count a wide letter as one column.
    lines: list[str] = []
    line, is_empty = indent, True
    for word in re.split(r"\s", text):
        if not is_empty and cell_len(f"{line} {word}") > width:
            lines.append(line.rstrip())
            line, is_empty = indent if hanging is None else hanging, True
        line = line + word if is_empty else f"{line} {word}"
        is_empty = is_empty and not word
    return lines if is_empty else [*lines, line.rstrip()]


def labelled(label: str, text: str, width: int) -> list[str]:
    """Return `label: text` within a width, the text hanging below its own beginning.

    >>> labelled("next", "flatout tune train.py", 80)
    ['next  flatout tune train.py']
    """
    start = f"{label}  "
    return wrapped(text, width, indent=start, hanging=" " * cell_len(start))


def sentence(text: str) -> str:
    """Return the text with one full stop at its end.

    >>> sentence("it waits"), sentence("it waits.")
    ('it waits.', 'it waits.')
    """
    return text.rstrip(". ") + "."


def ascii_only(text: str) -> str:
    r"""Return the text in plain ASCII; what has no ASCII form is escaped, controls too.

    A script's name or its traceback may hold anything, also bytes that move a terminal's cursor.

    >>> ascii_only("loss \u2192 nan\x1b[2J end")
    'loss \\u2192 nan\\x1b[2J end'
    """
    plain = text.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in plain)


def printable(text: str) -> str:
    r"""Return the text with every character that a terminal would act upon escaped.

    >>> printable("\u03b1\x1b[2J \u202e end") == "\u03b1\\x1b[2J \\u202e end"
    True
    """
    return "".join(c if c.isprintable() or c in "\n\t" else ascii_only(c) for c in text)


def padded(text: str, width: int, *, is_number: bool = False) -> str:
    """Return the text filled with blanks to a width, a number from the left."""
    blanks = " " * (width - cell_len(text))
    return blanks + text if is_number else text + blanks
