"""A few samples take most of the time in which batches are made."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.10
"""Of the step in waiting for data: below, no sample is worth a reader's time."""
MIN_OF_MAKING = 0.20
"""Of the time of all samples: below, all of them together cost more."""
MOST_SAMPLES = 0.10
"""Of all samples: of more it is the set that is uneven, not a few of it that are odd."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report samples that take ten times the median and a fifth of the time of all."""
    pipeline, wait = profile.pipeline, profile.lost_to_data
    if pipeline is None or wait < MIN_SHARE or pipeline.slow_share < MIN_OF_MAKING:
        return None
    if pipeline.slow_samples > MOST_SAMPLES * pipeline.samples:
        return None
    number = pipeline.slowest_sample
    return Finding(
        code="slow_samples",
        share=wait * pipeline.slow_share,
        because=words(
            "finding.slow_samples.because",
            n=str(pipeline.slow_samples),
            samples=str(pipeline.samples),
            share=format_share(pipeline.slow_share),
            slowest=format_ms(pipeline.slowest_ms),
            median=format_ms(pipeline.median_ms),
        ),
        next=words("finding.slow_samples.next_unknown")
        if number is None
        else words("finding.slow_samples.next", number=str(number)),
        evidence={
            "slow_samples": float(pipeline.slow_samples),
            "slow_share": pipeline.slow_share,
            "slowest_ms": pipeline.slowest_ms,
            "median_ms": pipeline.median_ms,
        },
    )
