"""A DistributedSampler shuffles in the same order in every epoch."""

import math
from itertools import pairwise

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import LoaderFacts, Profile

TRAINS_WRONG = True
IN_PROJECT = ("DS04",)
SAMPLER = "DistributedSampler"
MIN_ORDERS = 1_000_000
"""Beginnings that an epoch may have: of fewer, two may be equal by chance."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a shuffling sampler whose epochs all began with the same samples."""
    for loader in profile.training_loaders:
        if len(profile.ranks) > 1 and _repeats(loader):
            return Finding(
                code="same_order",
                share=1.0,
                is_bound=True,
                because=words(
                    "finding.same_order.because",
                    n=str(len(loader.epoch_samples)),
                    samples=tuple(map(str, loader.epoch_samples[0])),
                ),
                next=words("finding.same_order.next"),
                evidence={"epochs": float(len(loader.epoch_samples))},
                lines=(loader.line,) if loader.line else (),
            )
    return None


def _repeats(loader: LoaderFacts) -> bool:
    epochs = loader.epoch_samples
    if loader.sampler != SAMPLER or len(epochs) < 2 or len(set(epochs)) > 1:
        return False
    chosen = epochs[0]
    is_shuffled = any(later < earlier for earlier, later in pairwise(chosen))
    return is_shuffled and math.perm(loader.dataset_len or 0, len(chosen)) >= MIN_ORDERS
