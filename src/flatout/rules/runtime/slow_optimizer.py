"""The optimizer takes a large part of the step."""

from flatout.core.finding import Finding
from flatout.core.machine import Machine
from flatout.core.profile import OptimizerFacts, Profile
from flatout.core.units import format_ms, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, a faster update is not worth a reader's time."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the optimizer when its update is at least `MIN_SHARE` of the step."""
    del machine
    share = profile.share("optimizer")
    if share < MIN_SHARE:
        return None
    optimizer_ms, step_ms = profile.phases_ms["optimizer"], profile.step_ms.median
    tensors = sum(facts.parameter_tensors for facts in profile.optimizers)
    names = " and ".join(_describe(facts) for facts in profile.optimizers) or "the optimizer"
    return Finding(
        code="slow_optimizer",
        share=share,
        because=(
            f"{names} takes {format_ms(optimizer_ms)} of {format_ms(step_ms)} "
            f"({format_share(share)}, n={profile.step_ms.n})"
        ),
        next=_next(profile.optimizers),
        evidence={
            "optimizer_ms": optimizer_ms,
            "step_ms": step_ms,
            "parameter_tensors": float(tensors),
        },
    )


def _describe(facts: OptimizerFacts) -> str:
    kind = "fused" if facts.is_fused else "not fused"
    return f"{facts.name} ({kind}, {facts.parameter_tensors} tensors)"


def _next(optimizers: tuple[OptimizerFacts, ...]) -> str:
    if any(facts.has_fused_option and not facts.is_fused for facts in optimizers):
        return "update in one pass: flatout tune --only fused_optimizer train.py"
    return (
        "nothing faster is left for this update; more samples per step would spread it, "
        "but that changes the training"
    )
