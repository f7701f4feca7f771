"""The report on one profile for a terminal, short or with every detail, and as Markdown."""

from flatout.records.messages import ENGLISH, Messages, Text, code_of, messages, words, written
from flatout.records.profile import Profile
from flatout.reporting.blocks import (
    Advice,
    Facts,
    Section,
    escaped,
    markdown_lines,
    safe,
    terminal_lines,
)
from flatout.reporting.profile.sentences import ceilings_sentence, headline, readings
from flatout.reporting.profile.tables import sections
from flatout.reporting.tables import wrapped

MOST_LINES = 25
"""What fits on a screen: on 80 columns the short report has no more, unless warnings fill it."""
MOST_FINDINGS = 3
ALWAYS = ("step_time", "regime")
"""Readings of the short report: how fast it is, and what limits it now."""
SHOWN_APART = ("answer", "step", "findings", "next", "numbers", "ceilings")
"""Sections without a title; of the ceilings the readings say everything."""
ENDED_BADLY = ("note.partial", "note.partial_killed")
"""What a report of a script that did not end well begins with."""


def render_profile(
    profile: Profile,
    *,
    workload: str = "train.py",
    width: int = 80,
    language: str = ENGLISH,
    details: bool = False,
) -> str:
    """Return the report: the answer, the phases, what limits now, the findings, what to type."""
    say = messages(language)
    parts = {section.name: section for section in sections(profile, workload)}
    lines = _top(parts, say, width)
    if details:
        lines += [*_everything(parts, say, width), ""]
        lines += terminal_lines(parts["next"].blocks, say, width)
    else:
        lines += _short(profile, parts, say, width, room=MOST_LINES - len(lines))
    return safe("\n".join(lines), say) + "\n"


def render_partial(
    profile: Profile,
    *,
    workload: str = "train.py",
    width: int = 80,
    language: str = ENGLISH,
    room: int | None = MOST_LINES,
) -> str:
    """Return what was seen before a script ended badly; the failure's report says what to do next.

    `room`: the lines that are left below that report; None to show everything.
    """
    say = messages(language)
    parts = {section.name: section for section in sections(profile, workload)}
    said = [say.text(note) for note in profile.notes if code_of(note) in ENDED_BADLY]
    lines = [line for text in said for line in wrapped(text[:1].upper() + text[1:] + ".", width)]
    if room is None:
        lines += ["", *_top(parts, say, width), *_everything(parts, say, width)]
        return safe("\n".join(lines), say) + "\n"
    lines += terminal_lines(parts["answer"].blocks, say, width)
    step_time = _fact("step_time", dict(readings(profile))["step_time"], say, width)
    more = wrapped(say("about.more"), width)
    forms = (
        ["", *terminal_lines(parts["step"].blocks, say, width), "", *more],
        [*step_time, *more],
        step_time,
    )
    lines += next((form for form in forms if len(lines) + len(form) <= room), [])
    return safe("\n".join(lines), say) + "\n"


def _top(parts: dict[str, Section], say: Messages, width: int) -> list[str]:
    """Return the answer, warnings, on what it was measured, and the phases."""
    *answer, where = parts["answer"].blocks
    shown = (answer, [where], parts["step"].blocks)
    return [line for blocks in shown for line in (*terminal_lines(blocks, say, width), "")]


def _everything(parts: dict[str, Section], say: Messages, width: int) -> list[str]:
    """Return all that was measured, then why."""
    lines = terminal_lines(parts["numbers"].blocks, say, width)
    for name, section in parts.items():
        if name not in SHOWN_APART:
            title = f"[{say(f'section.{name}')}]"
            lines += ["", title, *terminal_lines(section.blocks, say, width)]
    for block in parts["findings"].blocks:
        lines += ["", *terminal_lines([block], say, width)]
    return lines


def _short(
    profile: Profile, parts: dict[str, Section], say: Messages, width: int, *, room: int
) -> list[str]:
    """Return what limits now, the findings and what to type next, in `room` lines if they fit."""
    known: dict[str, Text] = dict(readings(profile))
    rows = [_fact(name, known[name], say, width) for name in ALWAYS if name in known]
    rows.append(_fact("ceilings", ceilings_sentence(profile), say, width))
    then = terminal_lines(parts["next"].blocks, say, width)
    end = ["", *wrapped(say("about.more"), width), *then]
    found = [block for block in parts["findings"].blocks if isinstance(block, Advice)]
    room -= len(end)
    # A finding says what to do, so it goes before a ceiling, which says what that could gain.
    first = [*_advised(found[0], say, width), ""] if found else []
    while len(rows) > 1 and sum(map(len, rows)) + len(first) > room:
        rows.pop()
    lines = [line for row in rows for line in row] + [""] * min(len(found), 1)
    found = found[: min(MOST_FINDINGS, max(1, room - len(lines)))]
    # What the first line says needs no proof a second time.
    first_line = headline(profile)
    said = {
        block.finding.code
        for block in found
        if words("headline.because", because=written(block.finding.because)) == first_line
    }
    return [*lines, *_findings(found, said, say, width, room - len(lines)), *end]


def _findings(
    found: list[Advice], said: set[str], say: Messages, width: int, room: int
) -> list[str]:
    """Return the findings: names, then lines in the source, what to do, proof, as they fit.

    Those in `said` are proven elsewhere in the report.
    """
    forms = []
    for block in found:
        short = _fact("finding", block.short, say, width)
        source = terminal_lines([Facts(rows=block.source)], say, width)
        proven = [*_advised(block, say, width), *source]
        long = proven if block.finding.code in said else terminal_lines([block], say, width)
        forms.append((short, [*short, *source], proven, long))
    shown = [lines[0] for lines in forms]
    for form in (1, 2, 3):
        for number, lines in enumerate(forms):
            if sum(map(len, shown)) - len(shown[number]) + len(lines[form]) <= room:
                shown[number] = lines[form]
    return [line for lines in shown for line in lines]


def _advised(block: Advice, say: Messages, width: int) -> list[str]:
    """Return a finding's name and what to do about it."""
    rows = (("finding", block.short), ("advice", block.next(say)))
    return terminal_lines([Facts(rows=rows)], say, width)


def _fact(name: str, text: Text, say: Messages, width: int) -> list[str]:
    return terminal_lines([Facts(rows=((name, text),))], say, width)


def profile_markdown(
    profile: Profile, *, workload: str = "train.py", language: str = ENGLISH
) -> str:
    """Return the report: the answer, why, what to type next, then every table."""
    say = messages(language)
    answer, *others = sections(profile, workload)
    said = [escaped(say.text(text)) for text in answer.blocks if isinstance(text, str)]
    title, *warnings, where = said
    lines = [f"# {title}", "", where, ""]
    lines += [line for warning in warnings for line in (f"**{warning}**", "")]
    for section in others:
        lines += markdown_lines(section, say)
    return safe("\n".join(lines[:-1]), say) + "\n"
