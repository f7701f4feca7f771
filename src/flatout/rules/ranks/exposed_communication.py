"""The ranks spend their steps in talking to each other."""

from flatout.analysis.regime import exposed_communication
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.25
"""A quarter of the step in communication that nothing hides: the number of DS02 in the catalogue
of diagnostics."""
IN_PROJECT = ("DS01", "DS08")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report communication that is exposed on every rank, a straggler's waits left out."""
    seen = exposed_communication(profile)
    if seen is None:
        return None
    exposed_ms, step_ms = seen
    share = min(1.0, exposed_ms / step_ms) if step_ms else 0.0
    if share < MIN_SHARE:
        return None
    return Finding(
        code="exposed_communication",
        share=share,
        because=words(
            "finding.exposed_communication.because",
            exposed=format_ms(exposed_ms),
            step=format_ms(step_ms),
            share=format_share(share),
        ),
        next=words("finding.exposed_communication.next"),
        evidence={"exposed_ms": exposed_ms, "step_ms": step_ms},
    )
