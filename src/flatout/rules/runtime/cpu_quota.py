"""The container's quota leaves too few cores to make the samples, and the host has more."""

import math

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_count

MIN_SHARE = 0.10
"""Below a tenth of the step in waiting, cores are not worth a reader's time."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a quota below the cores of the affinity where the step waits for want of cores."""
    pipeline, share = profile.pipeline, profile.lost_to_data
    quota = machine.facts.get("quota_cores")
    cores = machine.facts.get("affinity_cores", machine.logical_cores)
    if quota is None or quota >= cores or share < MIN_SHARE:
        return None
    if pipeline is None or pipeline.is_fed:
        return None
    needed = pipeline.cores_needed * max(1, len(profile.ranks))
    return Finding(
        code="cpu_quota",
        share=share,
        is_bound=True,
        because=words(
            "finding.cpu_quota.because",
            quota=format_count(quota),
            cores=str(cores),
            needed=format_count(needed),
        ),
        next=words("finding.cpu_quota.next", cores=str(min(cores, math.ceil(needed)))),
        evidence={"quota_cores": quota, "affinity_cores": float(cores)},
    )
