"""The sections of a profile as tables in the reader's language, made to fit the terminal."""

from flatout.core.profile import Profile
from flatout.reporting.messages import Messages
from flatout.reporting.profile_tables import WORD_COLUMNS, Sheet, sheets
from flatout.reporting.tables import Column, display_width, table, wrapped

FEWEST = 2
"""Columns that stay however narrow the terminal is: a name and its number."""
MOST_ROWS = 8
"""A reader has a minute; the page and Markdown have every row."""
IN_THE_READINGS = frozenset({"ceilings"})
"""Sections that the lines above them tell already."""


def sheet_lines(profile: Profile, say: Messages, width: int) -> list[str]:
    """Return every table for which there is data, each below its title."""
    lines: list[str] = []
    previous = ""
    for sheet in sheets(profile, say):
        if sheet.name in IN_THE_READINGS:
            continue
        lines.append("")
        if sheet.name != previous:
            lines += [f"[{say(f'section.{sheet.name}')}]"]
        for text in sheet.sentences:
            lines += wrapped(text, width)
        lines += _fitting(sheet, say, width)
        previous = sheet.name
    return lines


def _fitting(sheet: Sheet, say: Messages, width: int) -> list[str]:
    """Return the table without the last columns that do not fit."""
    kept = list(range(len(sheet.columns)))
    lines = _table(sheet, kept, say)
    while len(kept) > FEWEST and max(map(display_width, lines)) > width:
        kept.pop()
        lines = _table(sheet, kept, say)
    return lines


def _table(sheet: Sheet, kept: list[int], say: Messages) -> list[str]:
    names = [sheet.columns[place] for place in kept]
    columns = [Column(say(f"column.{name}"), is_number=name not in WORD_COLUMNS) for name in names]
    return table(columns, [[row[place] for place in kept] for row in sheet.rows[:MOST_ROWS]])
