"""DDP looks for unused parameters in every step, and there are none."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the search where DDP found nothing; it is a part of the forward, at most."""
    share = profile.share("forward")
    if share <= 0 or not any(m.finds_unused and m.unused_bytes == 0 for m in profile.models):
        return None
    return Finding(
        code="unused_search",
        share=share,
        is_bound=True,
        because=words("finding.unused_search.because"),
        next=words("finding.unused_search.next"),
        evidence={"forward_ms": profile.phases_ms["forward"]},
    )
