"""What `flatout check` found, as text, as annotations of GitHub, and as SARIF."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flatout.records.finding import NONE, SAFE, SUGGESTED, SourceCheck, SourceFinding
from flatout.records.messages import ENGLISH, Messages, Sentence, joined, messages, words

HOW = {SAFE: "check.how_safe", SUGGESTED: "check.how_suggested"}
LEVELS = {SAFE: "warning", SUGGESTED: "warning", NONE: "note"}


def check_text(found: SourceCheck, language: str = ENGLISH) -> str:
    """Return two lines for each finding, a line for each file that was not analysed, a summary."""
    say, lines = messages(language), []
    for path, finding in found.findings():
        place = f"{path}:{finding.line}:{finding.column}"
        lines.append(f"{place}: {finding.code} {say.text(finding.because)}")
        how = f"{say(HOW[finding.fix_class])}; " if finding.fix_class in HOW else ""
        write = say("check.write", instead=say.text(finding.instead))
        lines.append(f"    {write} [{how}{finding.page}]")
    lines += [f"{path}: {why}" for path, why in _left_out(found, say)]
    lines += [f"{each.path}: {say.text(note)}" for each in found.files for note in each.notes]
    return "\n".join([*lines, say.text(_summary(found)), ""])


def check_github(found: SourceCheck, language: str = ENGLISH) -> str:
    """Return a workflow command for each finding: GitHub shows them at their lines."""
    say = messages(language)
    lines = [
        f"::warning file={_property(path)},line={finding.line},endLine={finding.end_line},"
        f"col={finding.column},title={_property(finding.code)}::" + _data(say.text(_said(finding)))
        for path, finding in found.findings()
    ]
    for path, why in _left_out(found, say):
        lines.append(f"::notice file={_property(path)}::{_data(why)}")
    return "\n".join([*lines, say.text(_summary(found)), ""])


def check_sarif(found: SourceCheck, version: str) -> dict[str, Any]:
    """Return the SARIF 2.1.0 document."""
    rules = {finding.code: finding for _path, finding in found.findings()}
    driver = {
        "name": "flatout",
        "version": version,
        "rules": [
            {"id": code, "name": rule.rule, "help": {"text": rule.page}}
            for code, rule in sorted(rules.items())
        ],
    }
    return {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": driver},
                "columnKind": "unicodeCodePoints",
                "results": [_result(path, finding) for path, finding in found.findings()],
            }
        ],
    }


def _result(path: str, finding: SourceFinding) -> dict[str, Any]:
    start = {"startLine": finding.line, "startColumn": finding.column}
    region = start | {"endLine": finding.end_line}
    uri = Path(path).as_uri() if os.path.isabs(path) else quote(path)  # noqa: PTH117  no I/O
    place = {"artifactLocation": {"uri": uri}, "region": region}
    return {
        "ruleId": finding.code,
        "level": LEVELS[finding.fix_class],
        "message": {"text": _said(finding)},
        "locations": [{"physicalLocation": place}],
    }


def _said(finding: SourceFinding) -> Sentence:
    return words("check.because_write", because=finding.because, instead=finding.instead)


def _left_out(found: SourceCheck, say: Messages) -> Iterator[tuple[str, str]]:
    for each in found.files:
        if each.not_analysable:
            yield each.path, say("check.not_analysable", why=say.text(each.not_analysable))


def _summary(found: SourceCheck) -> str:
    """Return the last line: how much was found, and what writes the fixes.

    >>> _summary(SourceCheck(files=()))
    'no Python files'
    """
    if not found.files:
        return words("check.no_files")
    count = len(found.files)
    files = words("pack.file" if count == 1 else "pack.files", n=str(count))
    count = found.count()
    name = ("nothing", "found")[count] if count < 2 else "found_many"
    about = {"n": str(count)} if count else {}
    parts = [words(f"check.{name}", files=files, **about)]
    if found.fixed:
        parts = [words("check.fixed", n=str(found.fixed), rest=parts[0])]
    for kind in (SAFE, SUGGESTED):
        if count := found.count(kind):
            parts.append(words(f"check.{kind}", n=str(count)))
    return joined(*parts)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
