"""Convolutions whose kernels have to change the layout of channels-first memory."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import ModelFacts, Profile
from flatout.records.units import format_share

MIN_WEIGHTS = 8
"""Convolutions: with fewer, the model is about something else."""
MIN_SHARE = 0.05
"""Of the kernels' time in changing layouts, where a trace measured it."""
MENDED_BY = frozenset({"channels_last"})


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report models of convolutions whose kernels change the layout.

    A trace says what it costs. Without one it is what kernels of low precision do, at a cost that
    is not known.
    """
    converting = profile.trace.layout_conversion_share if profile.trace else None
    wasteful = [
        model
        for model in profile.models
        if model.conv_weights >= MIN_WEIGHTS
        and not model.is_channels_last
        and (_is_low(model) if converting is None else converting >= MIN_SHARE)
    ]
    computing = profile.share("forward", "backward")
    if not wasteful or profile.device_kind == "cpu" or not computing:
        return None
    model = wasteful[0]
    said = "" if converting is None else "_measured"
    return Finding(
        code="channels_first",
        share=computing if converting is None else converting * profile.device_busy_share,
        is_bound=converting is None,
        because=words(
            f"finding.channels_first.because{said}",
            model=model.name,
            n=str(model.conv_weights),
            share=format_share(converting or 0.0),
        ),
        next=words(
            "finding.channels_first.next", command="flatout tune --only channels_last train.py"
        ),
        evidence={"conv_weights": float(model.conv_weights), "converting": converting or 0.0},
    )


def _is_low(model: ModelFacts) -> bool:
    return model.used_autocast or not {"float16", "bfloat16"}.isdisjoint(model.dtypes)
