"""The report of `doctor`: what stands between this machine and good training."""

from collections.abc import Sequence

from flatout.core.check import BAD, OK, WARN, Check
from flatout.core.machine import Machine
from flatout.reporting.tables import ascii_only, labelled, wrapped

MARKS = {OK: "ok  ", WARN: "warn", BAD: "BAD "}


def render_doctor(machine: Machine, checks: Sequence[Check], *, width: int = 80) -> str:
    """Return the report: the answer, every check with what to do, what to type next."""
    lines = [*wrapped(_headline(machine, checks), width), ""]
    for check in checks:
        lines += labelled(MARKS[check.status], check.what, width)
        for text in (check.why, f"do: {check.next}" if check.next else ""):
            lines += wrapped(text, width, indent=" " * 6)
    lines += ["", "next  flatout measure train.py"]
    return ascii_only("\n".join(lines)) + "\n"


def _headline(machine: Machine, checks: Sequence[Check]) -> str:
    where = f"A training script finds {machine.device.name} ({machine.device.kind})"
    bad = sum(check.status == BAD for check in checks)
    warned = sum(check.status == WARN for check in checks)
    if bad:
        return f"{where}; {bad} of {len(checks)} checks must be mended first, {warned} may cost."
    if warned:
        return f"{where}; it works, and {warned} of {len(checks)} checks may cost speed."
    return f"{where}; all {len(checks)} checks are well."
