"""One rank does more work of its own than the others, and all of them wait for it."""

import statistics

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.readings import RankFacts


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the rank that is behind; what is behind enough is decided where ranks are compared."""
    last = next((rank for rank in profile.ranks if rank.is_straggler), None)
    if last is None:
        return None
    others = [_own_ms(rank) for rank in profile.ranks if rank is not last]
    lag_ms = _own_ms(last) - statistics.median(others)
    count = len(others)
    return Finding(
        code="straggler",
        share=max(0.0, min(1.0, lag_ms / last.step_ms)),
        because=words(
            "finding.straggler.because",
            rank=str(last.rank),
            others=words("finding.straggler.one_other")
            if count == 1
            else words("finding.straggler.others", n=str(count)),
            why=last.because,
        ),
        next=words("finding.straggler.next"),
        evidence={"rank": float(last.rank), "lag_ms": lag_ms, "ranks": float(count + 1)},
    )


def _own_ms(rank: RankFacts) -> float:
    """Return the step without what is spent in waiting for others.

    Where the host cannot see communication, the backward holds it and stays out.
    """
    waits_ms = rank.exposed_communication_ms
    return rank.step_ms - (rank.phases_ms["backward"] if waits_ms is None else waits_ms)
