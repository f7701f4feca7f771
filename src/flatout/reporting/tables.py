"""Plain tables for a terminal: aligned columns, no colour, no borders; wide letters count two."""

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.units import format_rate, with_prefix

SCRIPT = "train.py"
"""Stands for the user's script in the commands of findings."""
NOTHING = "-"
"""Stands for a number that does not exist, so that no cell is empty by accident."""


def format_flops(count: float) -> str:
    """Render a number of floating-point operations with three significant figures.

    >>> format_flops(3.1e12), format_flops(286_720), format_flops(12)
    ('3.10 TFLOP', '287 kFLOP', '12.0 FLOP')
    """
    value, prefix = with_prefix(count)
    return f"{format_rate(value)} {prefix}FLOP"


def sentence(text: str) -> str:
    """Return the text with one full stop at its end.

    >>> sentence("it waits"), sentence("it waits.")
    ('it waits.', 'it waits.')
    """
    return text.rstrip(". ") + "."


def advice_words(advice: str, workload: str) -> str:
    """Return what to do about a finding, with the user's own script in its commands.

    >>> advice_words("look at the loop, then flatout measure train.py", "main.py --epochs 3")
    'look at the loop, then flatout measure main.py --epochs 3'
    """
    return advice.replace(SCRIPT, workload)


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
    widths = [max(map(display_width, cells)) for cells in zip(*header, *rows, strict=True)]
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
    if not (text + indent).isascii():
        return _wrapped_wide(text, width, indent, indent if hanging is None else hanging)
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
    return wrapped(text, width, indent=start, hanging=" " * display_width(start))


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


def display_width(text: str) -> int:
    r"""Return the columns that a text takes in a terminal.

    >>> display_width("step"), display_width("\uc2a4\ud15d"), display_width("e\u0301")
    (4, 4, 1)
    """
    return sum(
        0 if unicodedata.combining(c) else 1 + (unicodedata.east_asian_width(c) in "WF")
        for c in text
    )


def padded(text: str, width: int, *, is_number: bool = False) -> str:
    """Return the text filled with blanks to a display width, a number from the left."""
    blanks = " " * (width - display_width(text))
    return blanks + text if is_number else text + blanks


def _wrapped_wide(text: str, width: int, indent: str, hanging: str) -> list[str]:
    """Return the lines of a text with wide letters, broken between words only."""
    lines: list[str] = []
    line, is_empty = indent, True
    for word in text.split():
        if not is_empty and display_width(f"{line} {word}") > width:
            lines.append(line)
            line, is_empty = hanging, True
        line = line + word if is_empty else f"{line} {word}"
        is_empty = False
    return lines if is_empty else [*lines, line]


def _line(columns: Sequence[Column], cells: Sequence[str], widths: Sequence[int]) -> str:
    filled = [
        padded(cell, width, is_number=column.is_number)
        for column, cell, width in zip(columns, cells, widths, strict=True)
    ]
    return (" " * GAP).join(filled).rstrip()
