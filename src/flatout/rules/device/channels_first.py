"""Convolutions in low precision on channels-first memory."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import Profile

MIN_WEIGHTS = 8
"""Convolutions: with fewer, the model is about something else."""
MENDED_BY = frozenset({"channels_last"})


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report models of convolutions whose kernels have to change the layout; cost not known."""
    wasteful = [
        model
        for model in profile.models
        if model.conv_weights >= MIN_WEIGHTS
        and not model.is_channels_last
        and (model.used_autocast or not {"float16", "bfloat16"}.isdisjoint(model.dtypes))
    ]
    share = profile.share("forward", "backward")
    if not wasteful or profile.device_kind == "cpu" or not share:
        return None
    return Finding(
        code="channels_first",
        share=share,
        is_bound=True,
        because=words(
            "finding.channels_first.because",
            model=wasteful[0].name,
            n=str(wasteful[0].conv_weights),
        ),
        next=words(
            "finding.channels_first.next", command="flatout tune --only channels_last train.py"
        ),
        evidence={"conv_weights": float(wasteful[0].conv_weights)},
    )
