"""The allocator holds much more memory than the tensors need, and runs short of it."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes, format_share

MIN_SHARE = 0.15
"""Share of the device that is reserved and unused: below it, expandable segments bring nothing (the
prototype's replays show 5 to 23 % for ordinary models)."""
MENDED_BY = frozenset({"expandable_segments"})
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
SETTING = "expandable_segments:True"
NEARLY_FULL = 0.80
"""Share of the device that is reserved: with more room left fragmentation costs nothing."""
IN_PROJECT = ("SYN04",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report unused reserved memory on a device that is nearly full, or was flushed."""
    story = profile.memory
    if story is None or not story.reserved_bytes or story.fragmentation_share is None:
        return None
    room = machine.device.memory_bytes or 1
    unused = story.fragmentation_share * story.reserved_bytes
    retries = story.allocation_retries or 0
    is_short = retries > 0 or story.reserved_bytes >= NEARLY_FULL * room
    if unused < MIN_SHARE * room or not is_short or _is_set(machine):
        return None
    known = {
        "reserved": format_bytes(story.reserved_bytes),
        "room": format_bytes(room),
        "share": format_share(story.fragmentation_share),
    }
    return Finding(
        code="fragmented_memory",
        share=min(unused / room, 1.0),
        of="device",
        because=words("finding.fragmented_memory.because_flushed", **known, n=str(retries))
        if retries
        else words("finding.fragmented_memory.because", **known),
        next=words(
            "finding.fragmented_memory.next",
            command="flatout tune --only expandable_segments train.py",
        ),
        evidence={
            "reserved_bytes": float(story.reserved_bytes),
            "unused_bytes": unused,
            "allocation_retries": float(retries),
        },
    )


def _is_set(machine: Machine) -> bool:
    """Return whether the user has the technique on already: then something else is in the way."""
    variables = machine.facts.get("variables", {})
    return any(SETTING in variables.get(name, "") for name in VARIABLES)
