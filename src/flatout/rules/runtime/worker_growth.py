"""Loader workers need more memory with every step."""

from flatout.core.finding import Finding
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.units import GIB, MIB, format_bytes, format_share

MIN_GROWTH = 0.02
"""Least growth in a thousand steps, as a share of the machine's memory: 50,000 steps fill it."""
STEPS = 1_000
MIN_GROWTH_BYTES = 4 * 1024.0
"""Least growth of all workers in a step, in bytes: below it one page more or less decides."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the growth when it fills the memory within 50,000 steps."""
    workers = [facts for facts in profile.journey.workers if facts.number >= 0] if profile.journey else []
    growth = sum(max(0.0, facts.growth_bytes_per_step or 0.0) for facts in workers)
    memory = machine.memory_bytes
    if growth < MIN_GROWTH_BYTES or not memory or STEPS * growth / memory < MIN_GROWTH:
        return None
    held = sum(facts.pss_bytes or 0 for facts in workers)
    left = max(0, memory - held)
    return Finding(
        code="worker_growth",
        share=min(1.0, STEPS * growth / memory),
        because=(
            f"the memory of {len(workers)} loader workers grows by {format_bytes(growth)} a step "
            f"(now {format_bytes(held)}): after some {left / growth:,.0f} steps "
            f"the machine's {memory / GIB:.0f} GiB are full"
        ),
        next="hold",
        evidence={"growth_bytes_per_step": growth},
    )
