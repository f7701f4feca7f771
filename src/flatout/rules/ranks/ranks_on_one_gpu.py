"""Several ranks train on one GPU though there are more."""

from collections import Counter

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report ranks that share a GPU where each could have one of its own."""
    by_device = Counter(rank.device for rank in profile.ranks if rank.device)
    most = max(by_device.values(), default=0)
    if most < 2 or len(machine.devices) <= len(by_device):
        return None
    return Finding(
        code="ranks_on_one_gpu",
        share=1 - 1 / most,
        is_bound=True,
        because=words(
            "finding.ranks_on_one_gpu.because", n=str(most), devices=str(len(machine.devices))
        ),
        next=words("finding.ranks_on_one_gpu.next"),
        evidence={"ranks": float(most), "devices": float(len(machine.devices))},
    )
