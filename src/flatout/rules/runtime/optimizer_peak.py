"""The update of the optimizer is what the memory has to be large enough for."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes

MIN_PART = 0.10
"""Part of the peak that is only there in the update: less is rounding of the allocator's blocks."""
MIN_SHARE = 0.05
"""Part of the device's memory: with less, no batch grows by a sample."""
MENDED_BY = frozenset({"optimizer_in_backward"})


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a peak in the update that forward and backward stay well below."""
    story = profile.memory
    if story is None or story.peak_phase != "optimizer":
        return None
    others = max((size for name, size in story.by_phase.items() if name != "optimizer"), default=0)
    added = story.peak_bytes - others
    room = machine.memory_bytes if profile.device_kind == "cpu" else machine.device.memory_bytes
    share = added / room if room else 0.0
    if added < MIN_PART * story.peak_bytes or share < MIN_SHARE:
        return None
    return Finding(
        code="optimizer_peak",
        share=min(1.0, share),
        of="device",
        because=words(
            "finding.optimizer_peak.because",
            peak=format_bytes(story.peak_bytes),
            others=format_bytes(others),
        ),
        next=words(
            "finding.optimizer_peak.next",
            command="flatout tune --only fused_optimizer,optimizer_in_backward train.py",
        ),
        evidence={"peak_bytes": float(story.peak_bytes), "other_phases_bytes": float(others)},
    )
