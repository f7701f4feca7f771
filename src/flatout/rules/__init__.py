"""The rules that read a profile: one bottleneck, one file under `runtime`, found by its name.

A rule is a module with `check(profile, machine)`. It may name in `MENDED_BY` the techniques that
fix its bottleneck: with one of them in use, what the script says of itself no longer holds.
"""

import importlib
import sys
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from flatout.records.catalogue import module_names
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile

if TYPE_CHECKING:
    from flatout.records.finding import Finding

FAMILY = f"{__name__}.runtime."
"""Rules on a profile live in this folder; rules on source code have another `check`."""


def codes() -> tuple[str, ...]:
    """Return the codes of all rules on profiles, in alphabetical order."""
    return tuple(_modules())


def add_findings(profile: Profile, machine: Machine, in_use: Collection[str] = ()) -> Profile:
    """Return the profile with what the rules find in it.

    The largest share comes first, and after all others what is only known to be no more. A rule
    that fails is left out with a note: what was measured is worth more than what it says.

    Args:
        profile: What was measured.
        machine: Where.
        in_use: Names of the techniques that it was measured with.
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


def _modules() -> dict[str, str]:
    known = module_names(sys.modules[__name__])
    return {code: module for code, module in known.items() if module.startswith(FAMILY)}
