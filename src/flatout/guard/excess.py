"""How far an optimizer's updates are from those of the baseline's optimizer, from two records."""

import math
from collections.abc import Iterator

from flatout.guard.limits import ROUNDINGS, UPDATE_LIMIT
from flatout.guard.record import GuardRecord, Update


def excess(difference: float, step: float, parameter: float, spacing: float) -> float:
    """Return the difference of two updates beyond storage rounding, over the shadow's update.

    >>> excess(difference=0.1, step=1.0, parameter=0.0, spacing=2.0**-24)
    0.1
    >>> excess(difference=1e-8, step=1e-3, parameter=1.0, spacing=2.0**-24)
    0.0
    """
    if not math.isfinite(difference):
        return math.inf
    beyond = max(0.0, difference - ROUNDINGS * spacing * parameter)
    if beyond == 0.0:
        return 0.0
    return beyond / step if step > 0.0 else math.inf


def excesses(baseline: GuardRecord, candidate: GuardRecord) -> Iterator[tuple[Update, str, float]]:
    """Yield the excess of each tensor's update, for the optimizers that a shadow can follow."""
    strange = _strange(baseline)
    for update in candidate.updates:
        if update.optimizer not in strange:
            for name, norms in update.tensors.items():
                yield update, name, excess(*norms)


def find_update_obstacle(baseline: GuardRecord, candidate: GuardRecord) -> str | None:
    """Return what of the baseline's updates has no counterpart, None when all have."""
    if candidate.updates and not candidate.has_reference:
        return "the recipe's trial did not know the baseline's optimizer"
    strange = _strange(baseline)
    theirs = {(update.optimizer, update.step) for update in candidate.updates}
    for update in baseline.updates:
        place = (update.optimizer, update.step)
        if update.optimizer not in strange and place not in theirs:
            why = "; ".join(candidate.update_gaps) or "the step was not made"
            return f"update {update.step} of optimizer {update.optimizer}: {why}"
    return None


def update_notes(baseline: GuardRecord, candidate: GuardRecord) -> Iterator[str]:
    """Yield what the reader must know about updates that were not compared."""
    for gap in candidate.update_gaps or baseline.update_gaps:
        yield f"optimizer updates not compared: {gap}"
    strange = sorted(_strange(baseline))
    for number in strange:
        yield (
            f"optimizer updates not compared: optimizer {number} does not follow its own shadow "
            "(hidden state or randomness)"
        )
    steps = [norms[1] for item in candidate.updates for norms in item.tensors.values()]
    if steps and not any(steps):
        yield "optimizer updates not compared: they are zero in the first steps"
    if not candidate.updates and not candidate.update_gaps:
        yield "optimizer updates not compared: no step was shadowed"


def _strange(baseline: GuardRecord) -> set[int]:
    """Return the optimizers whose baseline does not do what its class and settings say."""
    return {
        update.optimizer
        for update in baseline.updates
        if any(excess(*norms) > UPDATE_LIMIT for norms in update.tensors.values())
    }
