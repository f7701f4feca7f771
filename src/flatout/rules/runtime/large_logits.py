"""The logits of a large vocabulary are most of the peak of the memory."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_bytes, format_share

MIN_PART = 0.30
"""Part of the peak: below a third, something else is to be looked at first."""
MIN_SHARE = 0.10
"""Part of the device's memory: below a tenth, no one is short of it."""
MIN_OUTPUTS = 4096
"""A layer with fewer outputs is no vocabulary."""
MENDED_BY = frozenset({"chunked_cross_entropy"})


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report tensors as wide as the last layer that hold much of the peak and of the device."""
    story, widest = profile.memory, max((m.widest_output for m in profile.models), default=0)
    if story is None or widest < MIN_OUTPUTS or not story.peak_bytes:
        return None
    logits = [t for t in story.largest if not t.kind and t.shape and t.shape[-1] == widest]
    held = sum(tensor.bytes for tensor in logits)
    room = machine.memory_bytes if profile.device_kind == "cpu" else machine.device.memory_bytes
    share = held / room if room else 0.0
    if held < MIN_PART * story.peak_bytes or share < MIN_SHARE:
        return None
    return Finding(
        code="large_logits",
        share=min(1.0, share),
        of="device",
        because=words(
            "finding.large_logits.because",
            n=str(len(logits)),
            size=format_bytes(held),
            outputs=f"{widest:,}",
            part=format_share(min(1.0, held / story.peak_bytes)),
            peak=format_bytes(story.peak_bytes),
        ),
        next=words(
            "finding.large_logits.next",
            command="flatout tune --only chunked_cross_entropy train.py",
        ),
        evidence={"logits_bytes": float(held), "peak_bytes": float(story.peak_bytes)},
    )
