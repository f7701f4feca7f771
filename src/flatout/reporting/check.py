"""What `flatout check` found, as text, as annotations of GitHub, and as SARIF."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.records.finding import NONE, SAFE, SUGGESTED, SourceCheck, SourceFinding

HOW = {SAFE: "--fix writes it", SUGGESTED: "--diff shows it", NONE: ""}
LEVELS = {SAFE: "warning", SUGGESTED: "warning", NONE: "note"}


def check_text(found: SourceCheck) -> str:
    """Return two lines for each finding, a line for each file that was not analysed, a summary."""
    lines = []
    for path, finding in found.findings():
        place = f"{path}:{finding.line}:{finding.column}"
        lines.append(f"{place}: {finding.code} {finding.because}")
        how = HOW[finding.fix_class]
        lines.append(f"    write: {finding.instead} [{how + '; ' if how else ''}{finding.page}]")
    lines += [f"{path}: not analysable: {why}" for path, why in _left_out(found)]
    lines += [f"{each.path}: {note}" for each in found.files for note in each.notes]
    return "\n".join([*lines, _summary(found), ""])


def check_github(found: SourceCheck) -> str:
    """Return a workflow command for each finding: GitHub shows them at their lines."""
    lines = [
        f"::warning file={_property(path)},line={finding.line},endLine={finding.end_line},"
        f"col={finding.column},title={_property(finding.code)}::"
        + _data(f"{finding.because}; write: {finding.instead}")
        for path, finding in found.findings()
    ]
    lines += [
        f"::notice file={_property(path)}::{_data(f'not analysable: {why}')}"
        for path, why in _left_out(found)
    ]
    return "\n".join([*lines, _summary(found), ""])


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
    region = {
        "startLine": finding.line,
        "startColumn": finding.column,
        "endLine": finding.end_line,
    }
    place = {"artifactLocation": {"uri": _uri(path)}, "region": region}
    return {
        "ruleId": finding.code,
        "level": LEVELS[finding.fix_class],
        "message": {"text": f"{finding.because}; write: {finding.instead}"},
        "locations": [{"physicalLocation": place}],
    }


def _uri(path: str) -> str:
    from urllib.parse import quote

    return Path(path).as_uri() if os.path.isabs(path) else quote(path)  # noqa: PTH117  no I/O


def _left_out(found: SourceCheck) -> Iterator[tuple[str, str]]:
    for each in found.files:
        if each.not_analysable:
            yield each.path, each.not_analysable


def _summary(found: SourceCheck) -> str:
    """Return the last line: how much was found, and what writes the fixes.

    >>> _summary(SourceCheck(files=()))
    'no Python files'
    """
    if not found.files:
        return "no Python files"
    files = f"{len(found.files)} file{'s' * (len(found.files) != 1)}"
    count = found.count()
    made = f"{found.fixed} fixed, " if found.fixed else ""
    if not count:
        return f"{made}nothing found in {files}"
    parts = [f"{made}{count} finding{'s' * (count != 1)} in {files}"]
    if safe := found.count(SAFE):
        parts.append(f"--fix fixes {safe} and keeps the numbers")
    if suggested := found.count(SUGGESTED):
        parts.append(f"--diff shows {suggested} more, --fix --suggested writes them")
    return "; ".join(parts)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
