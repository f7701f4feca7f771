"""The loader's workers need more memory with every step."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import GIB, MIB, format_bytes

STEPS = 1_000
MIN_GROWTH = 0.01
"""Least growth in a thousand steps, as a share of the machine's memory: slower, and 100,000 steps
fit into it."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the growth of the workers' own memory when it adds up."""
    journey = profile.journey
    workers = [facts for facts in journey.workers if facts.number >= 0] if journey else []
    # The journey is one rank's; the others on this host have as many workers.
    ranks = max(1, len(profile.ranks))
    growth = ranks * sum(facts.growth_bytes_per_step or 0.0 for facts in workers)
    share = STEPS * growth / machine.memory_bytes
    if share < MIN_GROWTH:
        return None
    held = ranks * sum(facts.pss_bytes or 0 for facts in workers)
    count = ranks * len(workers)
    left = max(0.0, (machine.memory_bytes - held) / growth)
    return Finding(
        code="worker_growth",
        share=min(1.0, share),
        of="memory",
        because=words(
            "finding.worker_growth.because",
            n=str(count),
            held=format_bytes(held),
            growth=f"{growth / MIB:.2f} MiB",
            more=format_bytes(STEPS * growth),
            steps=f"{STEPS:,}",
            size=f"{machine.memory_bytes / GIB:.0f} GiB",
            left=f"{left:,.0f}",
        ),
        next=words("finding.worker_growth.next"),
        evidence={
            "growth_bytes_per_step": growth,
            "worker_bytes": float(held),
            "workers": float(count),
            "steps_left": left,
        },
    )
