"""A mixture of experts is computed one expert after the other."""

from flatout.records.finding import Finding
from flatout.records.machine import Machine
from flatout.records.messages import words
from flatout.records.profile import ModelFacts, Profile
from flatout.records.units import format_share

MIN_EXPERTS = 4
"""A loop over fewer experts costs few launches."""
MIN_SHARE = 0.05
"""Experts that hold less of the model than a twentieth are not what the step waits for."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the experts when they are many and hold a visible part of the model."""
    model = max(profile.models, key=lambda one: one.experts, default=None)
    if model is None or model.experts < MIN_EXPERTS or not model.expert_parameters:
        return None
    # At most this much of forward and backward, by the experts' size.
    share = profile.share("forward", "backward") * _held(model)
    if share < MIN_SHARE:
        return None
    return Finding(
        code="expert_loop",
        share=share,
        is_bound=True,
        because=words(
            "finding.expert_loop.because",
            model=model.name,
            experts=str(model.experts),
            share=format_share(_held(model)),
        ),
        next=words("finding.expert_loop.next"),
        evidence={
            "experts": float(model.experts),
            "expert_parameters": float(model.expert_parameters),
        },
    )


def _held(model: ModelFacts) -> float:
    """Return the part of the parameters that the experts hold; frozen ones count in both."""
    return min(1.0, model.expert_parameters / max(model.all_parameters, model.parameters))
