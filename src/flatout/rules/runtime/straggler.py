"""One rank does more work of its own than the others, and all of them wait for it."""

import statistics

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.readings import RankFacts


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the rank that is behind; what is behind enough is decided where ranks are compared."""
    del machine
    last = next((rank for rank in profile.ranks if rank.is_straggler), None)
    if last is None:
        return None
    others = [_own_ms(rank) for rank in profile.ranks if rank is not last]
    lag_ms = _own_ms(last) - statistics.median(others)
    count = len(others)
    waiting = "the other rank" if count == 1 else f"{count} others"
    return Finding(
        code="straggler",
        share=max(0.0, min(1.0, lag_ms / last.step_ms)),
        because=f"rank {last.rank} holds up {waiting}: {last.because}",
        next=(
            "give every rank the same work and the same means: batches of one size, samples of one "
            "length, loader workers and cores of its own; then flatout measure again"
        ),
        evidence={"rank": float(last.rank), "lag_ms": lag_ms, "ranks": float(count + 1)},
    )


def _own_ms(rank: RankFacts) -> float:
    """Return the step without what is spent in waiting for others.

    Where the host cannot see communication, the backward holds it and stays out.
    """
    waits_ms = rank.exposed_communication_ms
    return rank.step_ms - (rank.phases_ms["backward"] if waits_ms is None else waits_ms)
