"""Much of what the model computes is padding."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile
from flatout.records.units import format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, shorter batches are not worth a reader's time."""
MENDED_BY = frozenset({"dynamic_padding", "length_buckets", "sequence_packing"})
IN_PROJECT = ("DL21",)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the padding when forward and backward may spend `MIN_SHARE` of the step on it.

    A kernel may skip what the mask takes out, so the share is a bound.
    """
    padded = max((loader.pad_share or 0.0 for loader in profile.training_loaders), default=0.0)
    share = padded * profile.share("forward", "backward")
    if share < MIN_SHARE:
        return None
    return Finding(
        code="padding_waste",
        share=share,
        is_bound=True,
        because=words(
            "finding.padding_waste.because",
            padded=format_share(padded),
            share=format_share(share),
        ),
        next=words(
            "finding.padding_waste.next",
            command="flatout tune --only dynamic_padding,length_buckets,sequence_packing train.py",
        ),
        evidence={"pad_share": padded, "share": share},
    )
