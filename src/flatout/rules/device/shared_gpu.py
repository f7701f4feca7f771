"""Another process computes on the same GPU."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report processes of others that computed while the steps ran; what they cost is not known."""
    readings = profile.gpu
    working = readings.other_processes - readings.other_idle_processes if readings else 0
    if working < 1:
        return None
    return Finding(
        code="shared_gpu",
        share=1.0,
        is_bound=True,
        because=words("finding.shared_gpu.because", n=str(working)),
        next=words("finding.shared_gpu.next"),
        evidence={"other_processes": float(working)},
    )
