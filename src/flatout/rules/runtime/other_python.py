"""A large part of the step runs outside of what was seen of loading, model and optimizer."""

from flatout.records.finding import Finding
from flatout.records.journey import TRAINING
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, the loop's own code is not worth a reader's time."""
MIN_PART = 0.10
"""A part below a tenth of the rest is not named."""
EVALUATION = "evaluation"
LOOK = (
    "look in the training loop for what runs in every step, such as models that are not trained: "
    "printing, logging and metrics may run every tenth step, what the update needs may not; then "
    "flatout measure again"
)


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the rest of the loop when it is at least `MIN_SHARE` of the step."""
    del machine
    share = profile.share("other")
    if share < MIN_SHARE:
        return None
    other_ms, step_ms = profile.phases_ms["other"], profile.step_ms.median
    parts = _parts_ms(profile)
    largest = max(parts, key=lambda name: parts[name])
    is_worth_naming = parts[largest] >= MIN_PART * other_ms
    part = f"; {format_ms(parts[largest])} of it are {largest}" if is_worth_naming else ""
    return Finding(
        code="other_python",
        share=share,
        because=(
            f"{format_ms(other_ms)} of {format_ms(step_ms)} ({format_share(share)}, "
            f"n={profile.step_ms.n}) pass outside {_outside(profile)}{part}"
        ),
        next=_next(profile, evaluates=is_worth_naming and largest == EVALUATION),
        evidence={"other_ms": other_ms, "step_ms": step_ms, "eval_ms": profile.eval_ms},
    )


def _outside(profile: Profile) -> str:
    """Return what was seen. What was not is in the rest: making batches, or the forward pass.

    Models that are not trained, such as a teacher or a frozen encoder, are there always.
    """
    seen = f"{'trained model' if profile.models else 'backward'} and optimizer"
    return f"loading, {seen}" if profile.training_loaders else seen


def _parts_ms(profile: Profile) -> dict[str, float]:
    """Return the parts of the rest that can be told apart.

    Of the legs on the training thread the loss is in the rest alone; what is neither it nor the
    leg `other`, which evaluation belongs to, are copies.
    """
    legs = profile.journey.legs if profile.journey else ()
    own = {leg.name: leg.ms for leg in legs if leg.where == TRAINING}
    told_ms = own.get("loss", 0.0) + own.get("other", 0.0)
    return {
        EVALUATION: profile.eval_ms,
        "the loss": own.get("loss", 0.0),
        "copies": max(0.0, profile.phases_ms["other"] - told_ms) if own else 0.0,
    }


def _next(profile: Profile, *, evaluates: bool) -> str:
    if evaluates:
        return (
            "evaluate less often, unless it is part of the update, as calls of a target network "
            "or a teacher are; then flatout measure again"
        )
    if not profile.models:
        return (
            "no root module was seen: call the model itself and not its layers; one whose class "
            "has a __call__ of its own is not seen either; then " + LOOK
        )
    if not profile.training_loaders:
        return (
            "where the loop makes its batches itself, let a DataLoader make them in worker "
            "processes; then " + LOOK
        )
    return LOOK
