"""Shared memory does not hold the batches of the workers that would feed the step."""

import math

from flatout.analysis.feeding import (
    DEFAULT_PREFETCH,
    SHM_FACTOR,
    fitting_prefetch,
    useful_workers,
    workers_now,
)
from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import GIB, format_bytes

MIN_SHARE = 0.10
"""Below a tenth of the step in waiting, more workers are not worth a reader's time."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report /dev/shm where the workers that would help do not fit with torch's own prefetching."""
    share, loaders = profile.lost_to_data, profile.training_loaders
    if share < MIN_SHARE or not loaders:
        return None
    ranks, useful = max(1, len(profile.ranks)), useful_workers(profile, machine)
    workers, free = ranks * useful, machine.shm_free_bytes
    if useful <= workers_now(profile):
        return None
    if fitting_prefetch(loaders, workers, DEFAULT_PREFETCH, free) >= DEFAULT_PREFETCH:
        return None
    batch = sum(loader.batch_bytes for loader in loaders)
    needed = SHM_FACTOR * DEFAULT_PREFETCH * batch * workers
    return Finding(
        code="small_shm",
        share=share,
        is_bound=True,
        because=words(
            "finding.small_shm.because",
            n=str(workers),
            size=format_bytes(batch),
            needed=format_bytes(needed),
            free=format_bytes(free),
        ),
        next=words("finding.small_shm.next", gib=str(math.ceil(needed / GIB))),
        evidence={"needed_bytes": needed, "shm_free_bytes": float(free)},
    )
