"""The rules that read a profile: one bottleneck, one file, found by its name.

Those on what the device does are under `device`, on several ranks under `ranks`, all others under
`runtime`.

A rule is a module with `check(profile, machine)`. It may name in `MENDED_BY` the techniques that
fix its bottleneck: with one of them in use, what the script says of itself no longer holds. In
`AT_LINES` it names the source rules that see its cause at the lines that were measured, in
`IN_PROJECT` those whose findings are its cause wherever they are in the project. With
`TRAINS_WRONG` it says that the training learns other than was meant: it is not tuned before that
is fixed.
"""

import importlib
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from flatout.records.catalogue import module_names
from flatout.records.finding import Finding, SourceFinding, SourcePlace
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile

FAMILIES = tuple(f"{__name__}.{family}." for family in ("runtime", "device", "ranks"))
"""Rules on a profile live in these folders; rules on source code have another `check`."""
MOST_JOINED = 3
"""Findings that get a line of the source: a report grows by no more lines than that."""


def codes() -> tuple[str, ...]:
    """Return the codes of all rules on profiles, in alphabetical order."""
    return tuple(_modules())


def codes_of_wrong_training() -> frozenset[str]:
    """Return the codes of the rules on profiles with `TRAINS_WRONG`."""
    return frozenset(
        code
        for code, module in _modules().items()
        if getattr(importlib.import_module(module), "TRAINS_WRONG", False)
    )


def add_findings(profile: Profile, machine: Machine, in_use: Collection[str] = ()) -> Profile:
    """Return the profile with what the rules find in it.

    The largest share comes first, and after all others what is only known to be no more. A rule
    that fails is left out with a note: what was measured is worth more than what it says.
    """
    found: list[Finding] = []
    failed: list[str] = []
    for code, module in _modules().items():
        rule = importlib.import_module(module)
        if not set(in_use).isdisjoint(getattr(rule, "MENDED_BY", ())):
            continue
        try:
            finding = rule.check(profile, machine)
        except Exception as error:  # noqa: BLE001  the report must be written all the same
            failed.append(
                words("note.rule_failed", code=code, error=f"{type(error).__name__}: {error}")
            )
            continue
        if finding is not None:
            found.append(finding)
    ranked = sorted(found, key=lambda finding: (finding.is_bound, -finding.share))
    return replace(profile, findings=tuple(ranked), notes=(*profile.notes, *failed))


@dataclass(frozen=True, slots=True)
class FoundInFile:
    """A finding in a file of the user's project."""

    path: str
    """As the user would type it."""
    names: Collection[str]
    """The names that a profile may have for the file."""
    finding: SourceFinding


def add_places(profile: Profile, found: Sequence[FoundInFile]) -> Profile:
    """Return the profile with the lines of the source that its findings come from.

    A finding in the source belongs to one bottleneck, the first that it explains.
    """
    modules, left, joined = _modules(), list(found), 0
    findings = []
    for finding in profile.findings:
        rule = importlib.import_module(modules[finding.code])
        explaining = [each for each in left if _explains(each, finding, rule)]
        if explaining and joined < MOST_JOINED:
            left = [each for each in left if each not in explaining]
            joined += 1
            finding = replace(finding, places=tuple(map(_place, explaining)))
        findings.append(finding)
    return replace(profile, findings=tuple(findings))


def _explains(found: FoundInFile, finding: Finding, rule: ModuleType) -> bool:
    seen = found.finding
    if seen.code.startswith(getattr(rule, "IN_PROJECT", ())):
        return True
    if not seen.code.startswith(getattr(rule, "AT_LINES", ())):
        return False
    measured = (line.rpartition(":") for line in finding.lines)
    return any(
        name in found.names and seen.line <= int(number) <= seen.end_line
        for name, _colon, number in measured
    )


def _place(found: FoundInFile) -> SourcePlace:
    plain = found.finding.to_json(found.path)
    return SourcePlace(**{name: plain[name] for name in SourcePlace.__dataclass_fields__})


def _modules() -> dict[str, str]:
    known = module_names(sys.modules[__name__])
    return {code: module for code, module in known.items() if module.startswith(FAMILIES)}
