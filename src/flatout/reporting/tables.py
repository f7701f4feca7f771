"""Plain tables for a terminal: aligned columns, no colour, no borders; wide letters count two.

Nouns in words: the cells and phrases that text, Markdown and HTML share.
"""

import textwrap
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

from flatout.records.ablation import Comparison, LossCheck, Row, Verdict
from flatout.records.profile import PeakBytes
from flatout.records.units import (
    MAX_RATIO_END,
    format_bytes,
    format_interval,
    format_rate,
    format_ratio,
    format_share,
    with_prefix,
)

SCRIPT = "train.py"
"""Stands for the user's script in the commands of findings."""
NOTHING = "-"
"""Stands for a number that does not exist, so that no cell is empty by accident."""

VERDICT_WORDS = {
    Verdict.KEPT: "kept",
    Verdict.TOGETHER: "kept together",
    Verdict.NO_EFFECT: "too small",
    Verdict.WORSE: "slower",
    Verdict.INCONCLUSIVE: "inconclusive",
    Verdict.REJECTED: "rejected",
    Verdict.FAILED: "failed",
    Verdict.NOT_APPLICABLE: "not applicable",
}

LOSS_WORDS = {
    "same": "bit-identical",
    "within": "within limits",
    "rejected": "differs",
    "on_purpose": "on purpose",
    "not_compared": "not compared",
    "skipped": NOTHING,
}
"""What the guard saw: of a technique against the baseline, of the baseline against itself."""


def ratio_words(pair: Comparison | None) -> str:
    """Return the ratio of a comparison."""
    return format_ratio(pair.ratio) if pair else NOTHING


def interval_words(pair: Comparison | None) -> str:
    """Return the interval of a comparison."""
    return format_interval(*pair.interval) if pair else NOTHING


def pairs_words(pair: Comparison | None) -> str:
    """Return the number of pairs of a comparison."""
    return str(pair.n) if pair else NOTHING


def gain_words(pair: Comparison) -> str:
    """Say what a comparison shows, with its interval and n.

    >>> gain_words(Comparison(ratio=1.204, interval=(1.18, 1.23), n=5))
    '1.20x faster (95% interval 1.18-1.23, n=5 pairs)'
    >>> gain_words(Comparison(ratio=1.01, interval=(0.98, 1.05), n=5))
    'no difference (95% interval 0.98-1.05, n=5 pairs)'
    """
    proof = f"(95% interval {interval_words(pair)}, n={pair.n} pair{'s' * (pair.n != 1)})"
    if pair.interval[1] > MAX_RATIO_END:
        return f"{format_ratio(pair.ratio)}, not decided {proof}"
    if pair.covers_one:
        return f"no difference {proof}"
    if pair.ratio > 1:
        return f"{format_ratio(pair.ratio)} faster {proof}"
    return f"{format_ratio(pair.ratio)}, slower {proof}"


def verdict_words(row: Row) -> str:
    """Return the verdict on a technique; an interval that covers 1 is no difference."""
    pair = row.comparison
    if row.verdict is Verdict.NO_EFFECT and pair:
        if pair.n == 1 or pair.interval[1] < 1:
            return "no gain"
        if pair.covers_one:
            return "no difference"
    return VERDICT_WORDS[row.verdict]


def drop_words(row: Row) -> str:
    """Say what a kept technique still brings in the final recipe."""
    shown = f": {gain_words(row.comparison)}" if row.comparison else ""
    if row.verdict in (Verdict.NO_EFFECT, Verdict.WORSE):
        return f"it no longer pays{shown}"
    if row.verdict is Verdict.KEPT:
        return f"it still pays{shown}"
    return f"undecided in the few pairs there were time for{shown}"


def loss_words(check: LossCheck | None) -> str:
    """Return what the guard says about a recipe, in two words."""
    return LOSS_WORDS.get(check.status, check.status) if check else NOTHING


def settings_words(row: Row) -> str:
    """Return the settings of a technique on one line."""
    return row.choice.label.removeprefix(row.choice.technique).strip()


def memory_words(peak: PeakBytes) -> str:
    """Return the peak memory: what the device's tensors took, or the process where unknown."""
    count = peak.allocated or peak.device
    return format_bytes(count) if count else NOTHING


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


def busy_words(share: float | None) -> str:
    """Return the device-busy share."""
    return NOTHING if share is None else format_share(share)


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
