"""The device waits for the host to start the next kernel."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.30
"""SYN07 of the catalogue: with less, the device works off a queue for most of the step."""
MENDED_BY = frozenset({"torch_compile", "regional_compile"})


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report launches that bound the step, as the regime says."""
    share = profile.regime.shares.get("launch", 0.0) if profile.regime else 0.0
    if share < MIN_SHARE or profile.device_kind == "cpu":
        return None
    return Finding(
        code="launch_bound",
        share=share,
        because=words(
            "finding.launch_bound.because",
            share=format_share(share),
            step=format_ms(profile.step_ms.median),
            n=str(profile.step_ms.n),
        ),
        next=words("finding.launch_bound.next_compiled")
        if profile.compiling is not None
        else words(
            "finding.launch_bound.next",
            command="flatout tune --only torch_compile,regional_compile,fused_optimizer train.py",
        ),
        evidence={"launch_share": share, "step_ms": profile.step_ms.median},
    )
