"""The sections of a profile as tables in the reader's language, made to fit the terminal.

The report on one profile: where a step's time goes and what that could gain.
"""

import math

from flatout.records.finding import Finding
from flatout.records.profile import PHASES, Profile
from flatout.reporting.messages import ENGLISH, Messages, messages
from flatout.reporting.profile.gpu import gpu_lines, trace_lines
from flatout.reporting.profile.journey import journey_lines, pipeline_lines
from flatout.reporting.profile.limits import limits_lines, ranks_lines
from flatout.reporting.profile.memory import memory_lines, syncs_lines
from flatout.reporting.profile.sentences import (
    add_up,
    ceilings_sentence,
    cell,
    finding_sentence,
    headline,
    notes,
    readings,
    share_cells,
    warnings,
)
from flatout.reporting.profile.tables import WORD_COLUMNS, Sheet, sheets
from flatout.reporting.tables import (
    Column,
    advice_words,
    ascii_only,
    display_width,
    labelled,
    padded,
    printable,
    table,
    wrapped,
)

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


BAR_WIDTH = 30
"""Characters for a whole step in the table of phases."""


def render_profile(
    profile: Profile, *, workload: str = "train.py", width: int = 80, language: str = ENGLISH
) -> str:
    """Return the report: the answer, the phases, the readings, the findings, what to type next.

    Args:
        profile: What was measured.
        workload: What the user would type after `python`.
        width: Columns of the terminal.
        language: One of `flatout.reporting.messages.LANGUAGES`.
    """
    say = messages(language)
    kind, name = profile.device_kind, profile.device_name
    lines = wrapped(headline(profile, say), width)
    for warning in warnings(profile, say):
        lines += wrapped(warning, width)
    where = say("headline.where", workload=workload, device=name, kind=kind)
    lines += ["", *wrapped(where, width), "", *_phases(profile, say), ""]
    for label, text in readings(profile, say):
        lines += _labelled(label, text, say, width)
    lines += _labelled("ceilings", ceilings_sentence(profile, say), say, width)
    for note in notes(profile, say):
        lines += _labelled("note", note, say, width)
    if language == ENGLISH:
        lines += [*journey_lines(profile, width), *pipeline_lines(profile, width)]
        lines += [*limits_lines(profile, width), *gpu_lines(profile, width)]
        lines += [*ranks_lines(profile, width), *trace_lines(profile, width)]
        lines += [*memory_lines(profile, width), *syncs_lines(profile, width)]
    else:
        lines += sheet_lines(profile, say, width)
    for finding in profile.findings:
        lines += ["", *_finding(finding, say, width, workload)]
    lines += ["", f"{_label('next', say)}  flatout tune {workload}"]
    safe = ascii_only if language == ENGLISH else printable
    return safe("\n".join(lines)) + "\n"


def _phases(profile: Profile, say: Messages) -> list[str]:
    """Return the table; both columns add up to their last row as they are printed."""
    total = profile.step_ms.median
    scale, name = _time_unit(total)
    decimals = max(0, 3 - math.ceil(math.log10(max(total * scale, 1.0)))) + 1
    times = add_up([profile.phases_ms[phase] * scale for phase in PHASES], 10.0**-decimals)
    shares = add_up([100 * profile.share(phase) for phase in PHASES], 0.1)
    rows = [
        [
            say(f"phase.{phase}"),
            cell(time, profile.phases_ms[phase], decimals),
            text,
            _bar(share / 100),
        ]
        for phase, time, share, text in zip(
            PHASES, times, shares, share_cells(profile, shares), strict=True
        )
    ]
    rows.append([say("phase.step"), f"{sum(times):.{decimals}f}", f"{sum(shares):.1f} %", ""])
    columns = [
        Column(say("column.phase")),
        Column(name, is_number=True),
        Column(say("column.share"), is_number=True),
        Column(""),
    ]
    return table(columns, rows)


def _time_unit(step_ms: float) -> tuple[float, str]:
    """Return the factor from milliseconds and the unit that suits the whole table."""
    if step_ms >= 10_000:
        return 1e-3, "s"
    return (1.0, "ms") if step_ms >= 1 else (1e3, "us")


def _bar(share: float) -> str:
    return "#" * round(share * BAR_WIDTH)


def _label(name: str, say: Messages) -> str:
    """Return a label, as wide as the widest of the language."""
    labels = (text for key, text in say.texts.items() if key.startswith("label."))
    return padded(say(f"label.{name}"), max(map(display_width, labels)))


def _labelled(name: str, text: str, say: Messages, width: int) -> list[str]:
    return labelled(_label(name, say), text, width)


def _finding(finding: Finding, say: Messages, width: int, workload: str) -> list[str]:
    text = finding_sentence(finding, say)
    advice = advice_words(say.translated(finding.next), workload)
    return [
        *_labelled("finding", text, say, width),
        *_labelled("advice", advice, say, width),
    ]
