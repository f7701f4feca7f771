"""Plain tables for a terminal: aligned columns in ASCII, no colour, no borders."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

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
    height = max(len(lines) for lines in titles)
    header = [
        [lines[i - height + len(lines)] if i >= height - len(lines) else "" for lines in titles]
        for i in range(height)
    ]
    widths = [max(map(len, cells)) for cells in zip(*header, *rows, strict=True)]
    rule = "-" * (sum(widths) + GAP * (len(widths) - 1))
    return [
        *(_line(columns, cells, widths) for cells in header),
        rule,
        *(_line(columns, cells, widths) for cells in rows),
    ]


def wrapped(text: str, width: int, *, indent: str = "", hanging: str | None = None) -> list[str]:
    """Return the lines of a text within a width; words longer than that stay whole.

    >>> wrapped("one two three", 9, indent="  ")
    ['  one two', '  three']
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )


def labelled(label: str, text: str, width: int) -> list[str]:
    """Return `label: text` within a width, the text hanging below its own beginning.

    >>> labelled("next", "flatout tune train.py", 80)
    ['next  flatout tune train.py']
    """
    start = f"{label}  "
    return wrapped(text, width, indent=start, hanging=" " * len(start))


def ascii_only(text: str) -> str:
    r"""Return the text in plain ASCII; what has no ASCII form is escaped, controls too.

    A script's name or its traceback may hold anything, also bytes that move a terminal's cursor.

    >>> ascii_only("loss \u2192 nan\x1b[2J end")
    'loss \\u2192 nan\\x1b[2J end'
    """
    plain = text.encode("ascii", "backslashreplace").decode("ascii")
    return "".join(c if c.isprintable() or c in "\n\t" else f"\\x{ord(c):02x}" for c in plain)


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if column.is_number else cell.ljust(width)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return (" " * GAP).join(padded).rstrip()
