"""The rules that read a profile: one bottleneck, one file under `runtime`, found by its name."""

import importlib
import sys

from flatout.core.catalog import module_names
from flatout.core.finding import Finding
from flatout.core.machine import Machine
from flatout.core.profile import Profile

FAMILY = f"{__name__}.runtime."
"""Rules on a profile live in this folder; rules on source code have another `check`."""


def codes() -> tuple[str, ...]:
    """Return the codes of all rules on profiles, in alphabetical order."""
    return tuple(_modules())


def findings(profile: Profile, machine: Machine) -> tuple[Finding, ...]:
    """Return what the rules find in a profile, the largest share first."""
    found: list[Finding] = []
    for module in _modules().values():
        finding = importlib.import_module(module).check(profile, machine)
        if finding is not None:
            found.append(finding)
    return tuple(sorted(found, key=lambda finding: -finding.share))


def _modules() -> dict[str, str]:
    known = module_names(sys.modules[__name__])
    return {code: module for code, module in known.items() if module.startswith(FAMILY)}
