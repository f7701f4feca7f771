"""The report on one profile as Markdown, for a pull request or a wiki."""

from flatout.records.profile import Profile
from flatout.reporting.messages import ENGLISH, Messages, messages
from flatout.reporting.profile.sentences import (
    finding_sentence,
    headline,
    left_out,
    notes,
    readings,
    warnings,
)
from flatout.reporting.profile.tables import WORD_COLUMNS, Sheet, phases, sheets
from flatout.reporting.tables import advice_words, ascii_only, printable
from flatout.reporting.tuning.markdown import block, escaped


def profile_markdown(
    profile: Profile, *, workload: str = "train.py", language: str = ENGLISH
) -> str:
    """Return the report: the answer, why, what to type next, then every table.

    Args:
        profile: What was measured.
        workload: What the user would type after `python`.
        language: One of `flatout.reporting.messages.LANGUAGES`.
    """
    say = messages(language)
    name, kind = profile.device_name, profile.device_kind
    where = say("headline.where", workload=workload, device=name, kind=kind)
    lines = [f"# {escaped(headline(profile, say))}", "", escaped(where), ""]
    for warning in warnings(profile, say):
        lines += [f"**{escaped(warning)}**", ""]
    lines += [f"## {say('section.findings')}", "", *_findings(profile, say, workload), ""]
    lines += [f"## {say('section.next')}", "", *block(f"flatout tune {workload}", "sh"), ""]
    numbers = [(say(f"label.{name}"), text) for name, text in readings(profile, say)]
    lines += [f"## {say('section.numbers')}", ""]
    lines += [f"- {escaped(label)}: {escaped(text)}" for label, text in numbers]
    previous = ""
    for sheet in (phases(profile, say), *sheets(profile, say)):
        lines += [""] if sheet.name == previous else ["", f"## {say(f'section.{sheet.name}')}", ""]
        lines += _sheet(sheet, say)
        previous = sheet.name
    for section, told in (("notes", notes(profile, say)), ("left_out", left_out(profile, say))):
        if told:
            lines += ["", f"## {say(f'section.{section}')}", ""]
            lines += [f"- {escaped(text)}" for text in told]
    safe = ascii_only if language == ENGLISH else printable
    return safe("\n".join(lines)) + "\n"


def _findings(profile: Profile, say: Messages, workload: str) -> list[str]:
    if not profile.findings:
        return [say("about.no_findings")]
    lines = []
    for finding in profile.findings:
        text = finding_sentence(finding, say)
        advice = advice_words(say.translated(finding.next), workload)
        lines += [f"- {escaped(text)}", f"  {escaped(advice)}"]
    return lines


def _sheet(sheet: Sheet, say: Messages) -> list[str]:
    lines = [line for text in sheet.sentences for line in (escaped(text), "")]
    titles = [say(f"column.{name}") for name in sheet.columns]
    rule = ["---" if name in WORD_COLUMNS else "--:" for name in sheet.columns]
    body = [[escaped(cell) for cell in row] for row in sheet.rows]
    return lines + [f"| {' | '.join(cells)} |" for cells in (titles, rule, *body)]
