"""The ranks spend their steps in talking to each other."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.25
"""A quarter of the step in communication that nothing hides: the number of DS02 in the catalogue
of diagnostics."""
IN_PROJECT = ("DS01", "DS08")
TURNS = {"next": {"batch": "larger"}}


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report communication that is exposed on every rank, a straggler's waits left out.

    Whoever waits for a slow rank does so in a collective, so the rank that is last tells best what
    communication itself costs.
    """
    del machine
    seen = _of_ranks(profile) or _of_trace(profile)
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


def _of_ranks(profile: Profile) -> tuple[float, float] | None:
    """Return exposed communication and step of the rank that waits least; None where unseen."""
    known = [
        (rank.exposed_communication_ms, rank.step_ms)
        for rank in profile.ranks
        if rank.exposed_communication_ms is not None
    ]
    return min(known, key=lambda pair: pair[0], default=None)


def _of_trace(profile: Profile) -> tuple[float, float] | None:
    """Return what one rank's trace shows; it cannot tell waiting for a straggler from bandwidth."""
    trace = profile.trace
    if trace is None or not trace.exposed_communication_ms:
        return None
    if any(rank.is_straggler for rank in profile.ranks):
        return None
    return trace.exposed_communication_ms, trace.step_ms
