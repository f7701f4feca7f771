"""Attention runs on the backend that writes every weight to memory."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_share

MATH = "math"
MIN_SHARE = 0.10
"""Below a tenth of the step in forward and backward, attention is not worth a reader's time."""
IN_PROJECT = ("LP07",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report a model whose fused attention fell back to the formula.

    What attention takes of forward and backward is not known, so the share is a bound.
    """
    slow = next((model for model in profile.models if model.attention_backend == MATH), None)
    if slow is None:
        return None
    share = profile.share("forward", "backward")
    if share < MIN_SHARE:
        return None
    return Finding(
        code="math_attention",
        share=share,
        is_bound=True,
        because=words(
            "finding.math_attention.because",
            model=slow.name,
            why=slow.attention_why,
            share=format_share(share),
        ),
        next=words("finding.math_attention.next"),
        evidence={"share": share},
    )
