"""The classic estimate M = P*D_param + B*A*D_act + O*D_opt, beside what was traced."""

from collections.abc import Mapping
from dataclasses import dataclass

from flatout.memory.stream import Component

COUNTED = (Component.PARAMETERS, Component.ACTIVATIONS, Component.OPTIMIZER)
"""The three terms: parameters, activations of the batch, optimizer state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """The estimate with the true bytes of its three terms, and what it leaves out."""

    bytes: int
    missed: Mapping[str, int]
    """Bytes at the peak that no term counts, by name, the largest first."""


def formula(at_peak: Mapping[Component, int], largest: Mapping[Component, int]) -> Formula:
    """Return the estimate.

    Args:
        at_peak: bytes alive at the peak.
        largest: largest bytes of each component at any time: the formula adds them up as if
            they met.
    """
    missed = {part.value: count for part, count in at_peak.items() if part not in COUNTED and count}
    return Formula(
        bytes=sum(largest.get(part, 0) for part in COUNTED),
        missed=dict(sorted(missed.items(), key=lambda item: -item[1])),
    )
