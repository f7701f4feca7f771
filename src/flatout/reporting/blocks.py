"""What a report consists of, without a language, and the renderers for a terminal and for Markdown.

A report is a list of sections, and a section a list of blocks: sentences, readings, tables with a
bar in each row, findings, and the command to type next. Words come from the catalogue alone.
"""

import re
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TypeAlias

from rich.cells import cell_len

from flatout.records.finding import NONE, Finding
from flatout.records.messages import ENGLISH, Messages, Sentence, Text, named, words, written
from flatout.records.units import format_share
from flatout.reporting.tables import Column, ascii_only, labelled, padded, printable, table, wrapped

WORD_COLUMNS = frozenset(
    {
        *("kernel", "operator", "phase", "leg", "techniques", "cause", "reading", "made_in"),
        *("line", "module", "what", "worker", "shape"),
        *("technique", "settings", "promise", "loss_check", "verdict", "stage", "method"),
        *("when", "script", "addresses", "gpu", "format", "pixels", "product", "role", "as"),
        *("part", "known_by", "kind", "made_by", "way", "fits", "spread_as", "time_known_by"),
    }
)
"""Columns that hold words; the others hold numbers, aligned to the right."""
UNKNOWN = words("reading.unknown")
SCRIPT = "train.py"
"""Stands for the user's script in the commands of findings."""
FEWEST = 2
"""Columns that stay however narrow the terminal is: a name and its number."""
MOST_ROWS = 10
"""Rows on a terminal: a reader has a minute. The page and Markdown have every row."""
MAX_WORD = 40
"""Letters of a cell on a terminal: kernels and modules may have names of any length."""
BAR_WIDTH = 30
"""Characters for a whole bar."""
SPECIAL = re.compile(r"([\\`*\[\]<>#!|~&$]|(?<!\w)_|_(?!\w))")
"""What Markdown, or HTML inside it, would read as markup; not the `_` inside a name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Readings, each behind the name of its label.

    One without a name belongs to the one above; where none has a name, each is an item of a list.
    A terminal shows none that is empty.
    """

    rows: tuple[tuple[str, Text], ...]
    labels: str = "label."
    """What the messages of the labels begin with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns by their names in the catalogue, and rows, each with its bar."""

    columns: tuple[str, ...]
    """One that is a sentence is the title itself."""
    rows: tuple[tuple[Text, ...], ...]
    shares: tuple[float, ...] = ()
    """Of each row the length of its bar, in [0, 1]; empty where bars would say nothing."""
    kinds: tuple[str, ...] = ()
    """Of each row the phase whose colour it has; empty where it has none."""
    details: tuple[Text, ...] = ()
    """Of each row what a terminal shows below it; with any, a terminal shows all rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A finding, and what to do about it."""

    finding: Finding
    workload: str
    """What the user would type after `python`."""

    @property
    def because(self) -> Sentence:
        """The sentence that proves it."""
        return words("reading.because", because=written(self.finding.because))

    @property
    def share(self) -> Sentence:
        """What share it has, and of what it is one."""
        of = named("finding_of", "bound" if self.finding.is_bound else self.finding.of)
        return words("reading.share", share=format_share(self.finding.share), of=of)

    @property
    def short(self) -> Sentence:
        """Its name and its share."""
        return words("reading.finding_short", code=self.finding.code, share=self.share)

    @property
    def long(self) -> Sentence:
        """The same with the sentence that proves it."""
        of = "bound" if self.finding.is_bound else self.finding.of
        return words(
            "reading.finding" if of == "step" else f"reading.finding_{of}",
            code=self.finding.code,
            share=format_share(self.finding.share),
            because=self.because,
        )

    @property
    def source(self) -> tuple[tuple[str, Text], ...]:
        """The row with its line in the source, none where no rule sees it there."""
        places = self.finding.places
        if not places:
            return ()
        first = next((place for place in places if place.fix != NONE), places[0])
        place = f"{first.path}:{first.line} ({first.code})"
        if len(places) > 1:
            place = words("reading.source_and_more", place=place, n=str(len(places) - 1))
        name = "source" if first.fix == NONE else "source_fix"
        return (("source", words(f"reading.{name}", place=place, path=shlex.quote(first.path))),)

    def next(self, say: Messages) -> str:
        """Return what to do, with the user's script in its commands."""
        return say.text(self.finding.next).replace(SCRIPT, self.workload)


@dataclass(frozen=True, slots=True, kw_only=True)
class Next:
    """The command to type next."""

    command: str


Block: TypeAlias = str | Facts | Table | Advice | Next


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Blocks under one title."""

    name: str
    """Of its title, among the messages `section.*`."""
    blocks: tuple[Block, ...]


def known_columns(block: Table) -> Table:
    """Return the table without the columns in which nothing is known."""
    kept = [
        place
        for place in range(len(block.columns))
        if place == 0 or any(row[place] != UNKNOWN for row in block.rows)
    ]
    return replace(
        block,
        columns=tuple(block.columns[place] for place in kept),
        rows=tuple(tuple(row[place] for place in kept) for row in block.rows),
    )


def safe(text: str, say: Messages) -> str:
    """Return a report's text without anything that a terminal would act upon; English is ASCII."""
    return ascii_only(text) if say.language == ENGLISH else printable(text)


def label_cell(name: str, say: Messages, labels: str = "label.") -> str:
    """Return a label, as wide as the widest of its kind; blank without a name."""
    kind = (text for key, text in say.texts.items() if key.startswith(labels))
    return padded(say(f"{labels}{name}") if name else "", max(map(cell_len, kind)))


def listed(texts: Iterable[Text]) -> Facts:
    """Return texts as the items of a list."""
    return Facts(rows=tuple(("", text) for text in texts))


def report(blocks: Iterable[Block], say: Messages, width: int) -> str:
    """Return a report for a terminal: its blocks, tables whole, with a blank line between."""
    shown = [
        _whole(block, say, width) if isinstance(block, Table) else _block_lines(block, say, width)
        for block in blocks
    ]
    return safe("\n\n".join("\n".join(lines) for lines in shown if lines), say) + "\n"


def terminal_lines(blocks: Iterable[Block], say: Messages, width: int) -> list[str]:
    """Return blocks as lines of a terminal."""
    return [line for block in blocks for line in _block_lines(block, say, width)]


def _block_lines(block: Block, say: Messages, width: int) -> list[str]:
    if isinstance(block, str):
        return wrapped(say.text(block), width)
    if isinstance(block, Table):
        return _fitting(block, say, width)
    if isinstance(block, Next):
        return [f"{say('label.next')}  {block.command}"]
    if isinstance(block, Advice):
        advice = (("finding", block.long), ("advice", block.next(say)), *block.source)
        block = Facts(rows=advice)
    lines: list[str] = []
    has_labels = any(name for name, _ in block.rows)
    for name, text in block.rows:
        if has_labels:
            lines += labelled(label_cell(name, say, block.labels), say.text(text), width)
        else:
            lines += wrapped(say.text(text), width, indent="- ", hanging="  ")
    return lines


def _fitting(block: Table, say: Messages, width: int) -> list[str]:
    """Return the table with its bars, or without the last columns that do not fit."""
    if block.details:
        return _whole(block, say, width)
    bars = ["#" * round(share * BAR_WIDTH) for share in block.shares]
    kept = len(block.columns)
    lines = _table(block, kept, say, bars)
    if bars and max(map(cell_len, lines)) > width:
        lines = _table(block, kept, say, [])
    while kept > FEWEST and max(map(cell_len, lines)) > width:
        kept -= 1
        lines = _table(block, kept, say, [])
    if len(block.rows) > MOST_ROWS:
        lines += wrapped(say("about.more_rows", n=len(block.rows) - MOST_ROWS), width)
    return lines


def _whole(block: Table, say: Messages, width: int) -> list[str]:
    cells = [[say.text(cell) for cell in row] for row in block.rows]
    lines = table(columns_of(block.columns, say), cells) if cells else []
    shown = lines[: len(lines) - len(cells)]
    for line, detail in zip_longest(lines[len(shown) :], block.details, fillvalue=""):
        shown += [line, *wrapped(say.text(detail), width, indent="  ")]
    return shown


def columns_of(names: Sequence[str], say: Messages) -> list[Column]:
    """Return the columns of a terminal's table: words to the left, numbers to the right."""
    return [Column(title_of(name, say), is_number=name not in WORD_COLUMNS) for name in names]


def title_of(column: str, say: Messages) -> str:
    """Return the title of a column."""
    return say.text(column) if isinstance(column, Sentence) else say(f"column.{column}")


def _table(block: Table, kept: int, say: Messages, bars: Sequence[str]) -> list[str]:
    columns = columns_of(block.columns[:kept], say)
    rows = [[cut(say.text(cell)) for cell in row[:kept]] for row in block.rows[:MOST_ROWS]]
    if bars:
        columns.append(Column(""))
        rows = [[*row, bar] for row, bar in zip(rows, bars, strict=False)]
    return table(columns, rows)


def cut(text: str) -> str:
    """Return a text without its middle where it is too wide for a cell.

    >>> cut("a" * 30 + "b" * 30)
    'aaaaaaaaaa...bbbbbbbbbbbbbbbbbbbbbbbbbbb'
    """
    if len(text) <= MAX_WORD:
        return text
    tail = (MAX_WORD - 3) * 3 // 4
    return f"{text[: MAX_WORD - 3 - tail]}...{text[-tail:]}"


def markdown_lines(section: Section, say: Messages) -> list[str]:
    """Return a section as lines of Markdown, with its title."""
    lines = [f"## {say(f'section.{section.name}')}", ""]
    for block in section.blocks:
        lines += [*_markdown(block, say), ""]
    return lines


def _markdown(block: Block, say: Messages) -> list[str]:
    if isinstance(block, str):
        return [escaped(say.text(block))]
    if isinstance(block, Next):
        return fenced(block.command, "sh")
    if isinstance(block, Advice):
        source = [f"  {escaped(say.text(text))}" for _label, text in block.source]
        return [f"- {escaped(say.text(block.long))}", f"  {escaped(block.next(say))}", *source]
    if isinstance(block, Facts):
        labels = (f"{say(f'{block.labels}{name}')}: " if name else "" for name, _ in block.rows)
        texts = (say.text(text) for _, text in block.rows)
        return [f"- {escaped(label + text)}" for label, text in zip(labels, texts, strict=True)]
    titles = [" ".join(title_of(name, say).split()) for name in block.columns]
    rule = ["---" if name in WORD_COLUMNS else "--:" for name in block.columns]
    body = [[escaped(say.text(cell)) for cell in row] for row in block.rows]
    return [f"| {' | '.join(cells)} |" for cells in (titles, rule, *body)]


def escaped(text: str) -> str:
    r"""Return the text so that Markdown shows it as it is, on one line.

    >>> escaped("a_b | _c_ <i>")
    'a_b \\| \\_c\\_ \\<i\\>'
    """
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def fenced(text: str, language: str) -> list[str]:
    """Return a fenced block, with a fence longer than any inside."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", text, fence]
