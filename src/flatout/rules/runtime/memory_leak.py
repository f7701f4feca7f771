"""Every step leaves memory behind."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import Text, words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes

STEPS = 1_000
"""Steps over which a leak is judged: an epoch of a common data set."""
MIN_SHARE = 0.01
"""Less than a hundredth of the memory in `STEPS` steps: losses and metrics that are kept on
purpose look like that."""
MIN_OBSERVED = 4
"""Observed steps: over fewer, one odd step looks like a slope."""
IN_PROJECT = ("MEM01", "MEM04", "MEM10")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a slope that fills at least `MIN_SHARE` of the memory within `STEPS` steps."""
    story = profile.memory
    if story is None or story.steps < MIN_OBSERVED or story.leak_bytes_per_step <= 0:
        return None
    # A GPU is one rank's; the host's memory is filled by all of them.
    is_cpu = profile.device_kind == "cpu"
    room = machine.memory_bytes if is_cpu else machine.device.memory_bytes
    ranks = max(1, len(profile.ranks)) if is_cpu else 1
    lost_per_step = ranks * story.leak_bytes_per_step
    share = STEPS * lost_per_step / room if room else 0.0
    if share < MIN_SHARE:
        return None
    line = next(iter(story.leak_by_line), "")
    size: Text = format_bytes(story.leak_bytes_per_step)
    if ranks > 1:
        size = words("finding.memory_leak.each_rank", size=size, ranks=str(ranks))
    known: dict[str, Text] = {
        "size": size,
        "n": str(story.steps),
        "steps": f"{room / lost_per_step:,.0f}",
        "room": format_bytes(room),
    }
    return Finding(
        code="memory_leak",
        share=min(share, 1.0),
        of="memory",
        because=words("finding.memory_leak.because_line", **known, line=line)
        if line
        else words("finding.memory_leak.because", **known),
        next=words("finding.memory_leak.next"),
        evidence={
            "leak_bytes_per_step": story.leak_bytes_per_step,
            "memory_bytes": float(room),
            "steps": float(story.steps),
        },
    )
