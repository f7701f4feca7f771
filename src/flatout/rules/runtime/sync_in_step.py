"""Lines of the loop make the host wait for the device in every step."""

from flatout.analysis.regime import idle_share
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.03
"""Below 3 % of the step, what a wait costs is within the noise of most comparisons."""
MAX_LINES = 3
"""Lines named in the sentence; the report's table has more."""
ADVICE = {
    **dict.fromkeys(("item", "float", "print", "tolist", "complex"), "logged"),
    **dict.fromkeys(("bool", "int", "equal", "allclose", "in"), "decided"),
    **dict.fromkeys(("to cpu", "numpy"), "copied"),
    **dict.fromkeys(("boolean index", "nonzero", "masked_select", "unique", "bincount"), "shaped"),
    "synchronize": "synchronize",
    "empty_cache": "empty_cache",
}
"""What helps, by what is waited for: names of its messages."""
AT_LINES = ("SYN",)
KOREAN = """
{line} ({what}, {n} a step)
  {line}({what}, 스텝마다 {n}번)
"""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the waits when together they may cost at least `MIN_SHARE` of the step.

    What they cost is at most what the device was idle: while it computes, a host that waits for it
    loses nothing. On the CPU a call costs what it takes.
    """
    step_ms = profile.step_ms.median
    costly = [sync for sync in profile.syncs if sync.ms_per_step]
    wait_ms = min(sum(sync.ms_per_step or 0.0 for sync in costly), step_ms)
    is_cpu = profile.device_kind == "cpu"
    cost_ms = wait_ms if is_cpu else min(wait_ms, idle_share(profile) * step_ms)
    if not costly or cost_ms < MIN_SHARE * step_ms:
        return None
    costly.sort(key=lambda sync: -(sync.ms_per_step or 0.0))
    share = cost_ms / step_ms
    return Finding(
        code="sync_in_step",
        share=share,
        because=words(
            f"finding.sync_in_step.because{'_cpu' * is_cpu}",
            cost=format_ms(cost_ms),
            step=format_ms(step_ms),
            share=format_share(share),
            lines=tuple(
                f"{sync.line} ({sync.what}, {sync.per_step:.3g} a step)"
                for sync in costly[:MAX_LINES]
            ),
        ),
        next=words(f"finding.sync_in_step.next_{ADVICE[costly[0].what]}"),
        lines=tuple(sync.line for sync in costly),
        evidence={
            "cost_ms": cost_ms,
            "wait_ms": wait_ms,
            "step_ms": step_ms,
            "waits_per_step": sum(sync.per_step for sync in costly),
        },
    )
