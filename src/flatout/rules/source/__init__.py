"""The rules that read source: one pattern, one file below its topic, found by its name.

A rule is a module with `check(script)` that yields issues. The file's name begins with the code:
`dl02_no_workers` is `DL02`. With `TRAINS_WRONG` it says that what it sees never trains what was
meant, those under `ranks` where there are several: speed is not tuned before that is fixed.
"""

import ast
import functools
import hashlib
import importlib
import sys
from collections.abc import Collection
from pathlib import Path

from flatout.analysis.source import edits
from flatout.analysis.source.script import Issue, Script, last_name
from flatout.records.catalogue import module_names
from flatout.records.errors import UserError, unknown
from flatout.records.finding import Fix, SourceFinding

MAX_ROUNDS = 4
"""A fix may make room for another: after so many rounds the rest is left for the next run."""


@functools.cache
def modules() -> dict[str, str]:
    """Return the module of each rule, by its name."""
    return module_names(sys.modules[__name__])


def code_of(rule: str) -> str:
    """Return the code of a rule.

    >>> code_of("dl02_no_workers")
    'DL02'
    """
    return rule.partition("_")[0].upper()


def codes() -> tuple[str, ...]:
    """Return the codes of all rules, in alphabetical order."""
    return tuple(sorted(code_of(rule) for rule in modules()))


def codes_of_wrong_training(*, of_ranks: bool) -> frozenset[str]:
    """Return the codes of the rules with `TRAINS_WRONG`, of those for several ranks or the rest."""
    return frozenset(
        code_of(rule)
        for rule, module in modules().items()
        if (".ranks." in module) == of_ranks
        and getattr(importlib.import_module(module), "TRAINS_WRONG", False)
    )


def selected(select: Collection[str], ignore: Collection[str]) -> frozenset[str]:
    """Return the codes that `select` and `ignore` leave; an entry is a code or its letters."""
    known = codes()
    groups = {code.rstrip("0123456789") for code in known}
    for entry in (*select, *ignore):
        if entry.upper() not in known and entry.upper() not in groups:
            raise UserError(unknown("code", entry, [*known, *groups]))
    chosen = tuple(entry.upper() for entry in select) or tuple(groups)
    left_out = tuple(entry.upper() for entry in ignore)
    return frozenset(
        code
        for code in known
        if code.startswith(chosen) and not (left_out and code.startswith(left_out))
    )


def check_text(text: str) -> tuple[list[SourceFinding], list[str]]:
    """Return what all rules find in a script, in the order of the text, and which rules failed.

    Raises:
        NotAnalysableError: if the text does not parse.
    """
    script = Script(text)
    if not script.uses_torch:
        return [], []
    found: dict[tuple[int, int, str], SourceFinding] = {}
    failed: list[str] = []
    for rule, module in modules().items():
        try:
            for issue in importlib.import_module(module).check(script):
                finding = _finding(script, rule, issue)
                if not _is_ignored(script, finding) and not _is_in_test(script, issue.node):
                    found.setdefault((finding.line, finding.column, finding.code), finding)
        except Exception as error:  # noqa: BLE001, PERF203  the other rules still speak
            failed.append(f"rule {rule} failed: {type(error).__name__}: {error}")
    return [found[place] for place in sorted(found)], failed


def fixed_text(text: str, wanted: Collection[str], *, suggested: bool) -> tuple[str, int]:
    """Return a script with its fixes made, and how many were.

    A fix after which it would no longer parse is left out.

    `suggested`: whether fixes that may change results are made, too.
    """
    made = 0
    for _ in range(MAX_ROUNDS):
        fixes = [
            finding.fix
            for finding in check_text(text)[0]
            if finding.fix and finding.code in wanted and (suggested or finding.fix.is_safe)
        ]
        new, count = edits.apply(text, fixes)
        if not edits.is_python(new):
            kept: list[Fix] = []
            for fix in fixes:
                kept += [fix] if edits.is_python(edits.apply(text, [*kept, fix])[0]) else []
            new, count = edits.apply(text, kept)
        if not count or new == text:
            break
        text, made = new, made + count
    return text, made


@functools.cache
def version() -> str:
    """Return a word that changes with any rule and with what the rules are built on."""
    places = [
        Path(__file__).parent,
        Path(edits.__file__).parent,
        Path(edits.__file__).parents[2] / "records",
    ]
    digest = hashlib.sha256(sys.version.encode())
    for path in sorted(path for place in places for path in place.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _finding(script: Script, rule: str, issue: Issue) -> SourceFinding:
    start, _end = script.span(issue.node)
    line: int = issue.node.lineno  # type: ignore[attr-defined]
    body = getattr(issue.node, "body", None)
    end = body[0].lineno - 1 if isinstance(body, list) else issue.node.end_lineno  # type: ignore[attr-defined]
    return SourceFinding(
        code=code_of(rule),
        rule=rule,
        line=line,
        column=start - script.line_start(line) + 1,
        end_line=max(line, end),
        because=issue.because,
        instead=issue.instead,
        fix=issue.fix,
    )


def _is_in_test(script: Script, node: ast.AST) -> bool:
    """Return whether a node is in a test of a library: what is slow or odd there, is on purpose."""
    return any(
        isinstance(each, ast.FunctionDef)
        and each.name.startswith("test_")
        and any(
            not isinstance(inner, ast.Call) or "assert" in last_name(inner.func).lower()
            for inner in script.within(each, ast.Assert, ast.Call)
        )
        for each in script.ancestors(node)
    )


def _is_ignored(script: Script, finding: SourceFinding) -> bool:
    lines = range(finding.line, finding.end_line + 1)
    silenced = [script.ignored[line] for line in lines if line in script.ignored]
    return any(codes is None or finding.code in codes for codes in silenced)
