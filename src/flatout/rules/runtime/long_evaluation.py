"""More time goes into evaluation than a faster training step could win back."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_share

MIN_SHARE = 1 / 3
"""Of the run: twice as fast a step then shortens the training by a third at most."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report evaluations between the steps that take a large part of the run."""
    if profile.eval_share < MIN_SHARE:
        return None
    return Finding(
        code="long_evaluation",
        share=profile.eval_share,
        of="run",
        because=words("finding.long_evaluation.because", share=format_share(profile.eval_share)),
        next=words("finding.long_evaluation.next"),
        evidence={"eval_share": profile.eval_share},
    )
