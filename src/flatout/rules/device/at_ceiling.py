"""The step takes hardly longer than its arithmetic on this device."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import LEAST_LEFT, Profile
from flatout.records.units import format_ms, format_share

MIN_REACHED = 0.90
"""Of the step. The rest is less than any other rule on the time speaks about, so none of them says
what this one denies."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a step that is near the least time for its arithmetic: it can be left as it is."""
    limits, step_ms = profile.limits, profile.step_ms.median
    if limits is None or not limits.least_step_ms or limits.least_step_ms < MIN_REACHED * step_ms:
        return None
    reached = min(1.0, limits.least_step_ms / step_ms)
    return Finding(
        code="at_ceiling",
        share=max(1 - reached, LEAST_LEFT),
        is_bound=True,
        because=words(
            "finding.at_ceiling.because",
            step=format_ms(step_ms),
            least=format_ms(limits.least_step_ms),
            dtype=limits.gemm_dtype,
            reached=format_share(reached),
            n=str(profile.step_ms.n),
        ),
        next=words("finding.at_ceiling.next"),
        evidence={"least_step_ms": limits.least_step_ms, "step_ms": step_ms},
    )
