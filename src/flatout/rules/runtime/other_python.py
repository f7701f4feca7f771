"""A large part of the step runs outside of what was seen of loading, model and optimizer."""

from flatout.records.finding import Finding
from flatout.records.journey import TRAINING
from flatout.records.machine import Machine
from flatout.records.messages import Text, words
from flatout.records.profile import Profile
from flatout.records.units import format_ms, format_share

MIN_SHARE = 0.10
"""Below a tenth of the step, the loop's own code is not worth a reader's time."""
MIN_PART = 0.10
"""A part below a tenth of the rest is not named."""
EVALUATION = "evaluation"
IN_PROJECT = ("SYN05", "SYN08")


def check(profile: Profile, machine: Machine) -> Finding | None:
    """Report the rest of the loop when it is at least `MIN_SHARE` of the step."""
    share = profile.share("other")
    if share < MIN_SHARE:
        return None
    other_ms, step_ms = profile.phases_ms["other"], profile.step_ms.median
    parts = _parts_ms(profile)
    largest = max(parts, key=lambda name: parts[name])
    is_worth_naming = parts[largest] >= MIN_PART * other_ms
    known: dict[str, Text] = {
        "other": format_ms(other_ms),
        "step": format_ms(step_ms),
        "share": format_share(share),
        "n": str(profile.step_ms.n),
        "what": words(f"finding.other_python.outside_{_outside(profile)}"),
    }
    name = "because"
    if is_worth_naming:
        name = "because_part"
        known["time"] = format_ms(parts[largest])
        known["part"] = words(f"finding.other_python.part_{largest}")
    return Finding(
        code="other_python",
        share=share,
        because=words(f"finding.other_python.{name}", **known),
        next=_next(profile, evaluates=is_worth_naming and largest == EVALUATION),
        evidence={"other_ms": other_ms, "step_ms": step_ms, "eval_ms": profile.eval_ms},
    )


def _outside(profile: Profile) -> str:
    """Name what was seen. What was not is in the rest: making batches, or the forward pass.

    Models that are not trained, such as a teacher or a frozen encoder, are there always.
    """
    if profile.training_loaders:
        return "all" if profile.models else "no_model"
    return "no_loader" if profile.models else "neither"


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
        "loss": own.get("loss", 0.0),
        "copies": max(0.0, profile.phases_ms["other"] - told_ms) if own else 0.0,
    }


def _next(profile: Profile, *, evaluates: bool) -> str:
    if evaluates:
        return words("finding.other_python.next_evaluate")
    look = words("finding.other_python.next")
    if not profile.models:
        return words("finding.other_python.next_model", look=look)
    if not profile.training_loaders:
        return words("finding.other_python.next_loader", look=look)
    return look
