"""Lines of the loop make the host wait for the device in every step."""

from flatout.core.finding import Finding
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.readings import SyncPoint
from flatout.core.units import format_ms, format_share

MIN_SHARE = 0.03
"""Below 3 % of the step, what a wait costs is within the noise of most comparisons."""
MAX_LINES = 3
"""Lines named in the sentence; the report's table has more."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the waits when together they are at least `MIN_SHARE` of the step."""
    del machine
    step_ms = profile.step_ms.median
    costly = [sync for sync in profile.syncs if sync.ms_per_step]
    wait_ms = min(sum(sync.ms_per_step or 0.0 for sync in costly), step_ms)
    if not costly or wait_ms < MIN_SHARE * step_ms:
        return None
    costly.sort(key=lambda sync: -(sync.ms_per_step or 0.0))
    share = wait_ms / step_ms
    return Finding(
        code="sync_in_step",
        share=share,
        because=(
            f"the host waits up to {format_ms(wait_ms)} of {format_ms(step_ms)} "
            f"({format_share(share)}) in calls that read values back: "
            f"{', '.join(_named(sync) for sync in costly[:MAX_LINES])}"
        ),
        next=(
            "keep the value on the device (.detach()) and read it every tenth step or one step "
            "later, then flatout measure again"
        ),
        evidence={
            "wait_ms": wait_ms,
            "step_ms": step_ms,
            "waits_per_step": sum(sync.per_step for sync in costly),
        },
    )


def _named(sync: SyncPoint) -> str:
    return f"{sync.line} ({sync.what}, {sync.per_step:.3g} a step)"
