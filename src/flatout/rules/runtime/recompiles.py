"""A compiled function is compiled again and again."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_duration

MIN_TIMES = 3
"""Of one function: torch compiles once more on purpose when a size changes, then for any size."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a function that was compiled four times or more, with torch's reason."""
    made = profile.compiling
    if made is None or made.most < MIN_TIMES:
        return None
    measured_s = profile.step_ms.median * profile.step_ms.n / 1e3
    return Finding(
        code="recompiles",
        share=made.recompile_s / (made.recompile_s + measured_s),
        is_bound=True,
        because=words(
            "finding.recompiles.because",
            place=made.place,
            n=str(made.most + 1),
            time=format_duration(made.recompile_s),
            reason=made.reason or "-",
        ),
        next=words("finding.recompiles.next"),
        evidence={"recompiles": float(made.recompiles), "recompile_s": made.recompile_s},
        lines=(made.place,) if made.place else (),
    )
