"""Batches are copied to the GPU from pageable memory."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.03
"""Of the step, as DL16 of the catalogue has it."""
MIN_GAIN = 1.02
"""What a run with free copies has to gain, where there was one: hidden copies cost nothing."""
MENDED_BY = frozenset({"pinned_memory", "device_prefetch"})
AT_LINES = ("DL16",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report copies that take a part of the step where a loader does not pin its batches."""
    share, ceilings = profile.share("h2d"), profile.ceilings
    loaders = [loader for loader in profile.training_loaders if not loader.pin_memory]
    if share < MIN_SHARE or not loaders or profile.device_kind == "cpu":
        return None
    if ceilings.is_measured and ceilings.free_copies < MIN_GAIN:
        return None
    copy_ms, step_ms = profile.phases_ms["h2d"], profile.step_ms.median
    return Finding(
        code="pageable_copies",
        share=share,
        because=words(
            "finding.pageable_copies.because",
            copy=format_ms(copy_ms),
            step=format_ms(step_ms),
            share=format_share(share),
            n=str(profile.step_ms.n),
        ),
        next=words(
            "finding.pageable_copies.next",
            command="flatout tune --only pinned_memory,device_prefetch train.py",
        ),
        lines=tuple(loader.line for loader in loaders if loader.line),
        evidence={"h2d_ms": copy_ms, "step_ms": step_ms},
    )
