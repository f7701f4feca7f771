"""A large part of the step runs outside loading, model and optimizer."""

from flatout.core.finding import Finding
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.units import format_ms, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, the loop's own code is not worth a reader's time."""


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the rest of the loop when it is at least `MIN_SHARE` of the step."""
    del machine
    share = profile.share("other")
    if share < MIN_SHARE:
        return None
    other_ms, step_ms = profile.phases_ms["other"], profile.step_ms.median
    return Finding(
        code="other_python",
        share=share,
        because=(
            f"{format_ms(other_ms)} of {format_ms(step_ms)} ({format_share(share)}, "
            f"n={profile.step_ms.n}) pass outside loading, model and optimizer"
        ),
        next=(
            "look in the training loop for what runs in every step beside them: losses and "
            "metrics outside the model, logging, printing, .item(), gradient norms; "
            "do it every tenth step, then flatout measure again"
        ),
        evidence={"other_ms": other_ms, "step_ms": step_ms},
    )
