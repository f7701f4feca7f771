"""How two guard records differ, as plain numbers.

`differences` compares gradients, buffers and losses; `excesses` the optimizers' updates.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from flatout.agent.guard.record import GradientSet, GuardRecord, Numbers, Sketches, Update
from flatout.guard.limits import EARLY_LOSSES, LIVE_SHARE, ROUNDINGS, TINY_LOSS, UPDATE_LIMIT
from flatout.records.messages import words

Key = tuple[int, int, str]
"""Optimizer, step, point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    """One tensor of a gradient against the baseline's."""

    error: float
    """Norm of the difference over the baseline's norm; infinite for values that are not finite."""
    slope: float
    """Regression of the gradient on the baseline's, minus one."""
    share: float
    """Norm of the gradient over the baseline's whole gradient."""
    is_live: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SetDifference:
    """One gradient against the baseline's."""

    moved: bool
    tensors: Mapping[str, TensorDifference]
    together: float
    """Norm of the difference over the baseline's norm, all tensors as one vector."""
    size: float = 0.0
    """Norm of the gradient over the baseline's, minus one, all tensors as one vector."""

    @property
    def median(self) -> float:
        """Median error of the live tensors; 0 without any."""
        live = [item.error for item in self.tensors.values() if item.is_live]
        return float(np.median(live)) if live else 0.0

    @property
    def largest(self) -> float:
        """Largest error of a live tensor; 0 without any."""
        return max((item.error for item in self.tensors.values() if item.is_live), default=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """One record against the baseline's, where both have something."""

    sets: Mapping[Key, SetDifference]
    buffers: Mapping[str, float]
    losses: tuple[float, ...]
    """Relative difference for each step that both have."""

    @property
    def is_zero(self) -> bool:
        """Whether every number is bit-identical."""
        errors = (t.error for item in self.sets.values() for t in item.tensors.values())
        return not any(errors) and not any(self.buffers.values()) and not any(self.losses)

    @property
    def loss(self) -> float:
        """Largest relative difference of a loss."""
        return max(self.losses, default=0.0)

    @property
    def early_loss(self) -> float:
        """The same of the first losses, which training has not amplified yet."""
        return max(self.losses[:EARLY_LOSSES], default=0.0)

    @property
    def later_loss(self) -> float:
        """The same of all others."""
        return max(self.losses[EARLY_LOSSES:], default=0.0)


def differences(baseline: GuardRecord, other: GuardRecord) -> Differences:
    """Compare gradients, buffers and losses of two records."""
    ours, theirs = by_key(baseline), by_key(other)
    return Differences(
        sets={key: _set(ours[key], theirs[key]) for key in ours if key in theirs},
        buffers={
            name: relative(value, other.buffers[name])
            for name, value in baseline.buffers.items()
            if name in other.buffers
        },
        losses=_losses(baseline.losses, other.losses),
    )


def by_key(record: GuardRecord) -> dict[Key, GradientSet]:
    """Return the gradients of a record by optimizer, step and point."""
    return {(item.optimizer, item.step, item.point): item for item in record.gradients}


def relative(baseline: Numbers, other: Numbers) -> float:
    """Return the norm of a difference over the baseline's norm.

    >>> relative(np.array([3.0, 4.0]), np.array([3.0, 4.5]))
    0.1
    """
    if baseline.shape != other.shape or not np.isfinite(other).all():
        return float("inf")
    return _ratio(float(np.linalg.norm(other - baseline)), float(np.linalg.norm(baseline)))


def is_finite(sketches: Sketches) -> bool:
    """Return whether every sketch is finite."""
    return all(np.isfinite(value).all() for value in sketches.values())


def _ratio(difference: float, norm: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / norm if norm > 0.0 else float("inf")


def _set(baseline: GradientSet, other: GradientSet) -> SetDifference:
    whole = _norm(baseline.sketches.values())
    line = LIVE_SHARE * whole / max(1, len(baseline.sketches)) ** 0.5
    both = {
        name: (value, other.sketches[name])
        for name, value in baseline.sketches.items()
        if name in other.sketches
    }
    missed = _norm(theirs - ours for ours, theirs in both.values() if ours.shape == theirs.shape)
    return SetDifference(
        moved=baseline.moved or other.moved,
        tensors={name: _tensor(*pair, whole=whole, line=line) for name, pair in both.items()},
        together=_ratio(missed, whole) if np.isfinite(missed) else float("inf"),
        size=_norm(theirs for _, theirs in both.values()) / whole - 1 if whole else 0.0,
    )


def _tensor(baseline: Numbers, other: Numbers, *, whole: float, line: float) -> TensorDifference:
    norm = float(np.linalg.norm(baseline))
    if baseline.shape != other.shape or not np.isfinite(other).all():
        nothing = float("inf")
        return TensorDifference(error=nothing, slope=nothing, share=nothing, is_live=norm > line)
    return TensorDifference(
        error=relative(baseline, other),
        slope=float((other - baseline) @ baseline) / norm**2 if norm > 0.0 else 0.0,
        share=_ratio(float(np.linalg.norm(other)), whole),
        is_live=norm > line,
    )


def _norm(vectors: Iterable[Numbers]) -> float:
    return math.sqrt(sum(float(v @ v) for v in vectors))


def _losses(baseline: Sequence[float], other: Sequence[float]) -> tuple[float, ...]:
    largest = max((abs(value) for value in baseline), default=0.0)
    return tuple(
        _ratio(abs(theirs - ours), max(abs(ours), TINY_LOSS * largest))
        if np.isfinite(theirs)
        else float("inf")
        for ours, theirs in zip(baseline, other, strict=False)
    )


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
        return words("guard.no_reference")
    strange = _strange(baseline)
    theirs = {(update.optimizer, update.step) for update in candidate.updates}
    for update in baseline.updates:
        place = (update.optimizer, update.step)
        if update.optimizer not in strange and place not in theirs:
            why = "; ".join(candidate.update_gaps) or words("guard.step_not_made")
            n, optimizer = str(update.step), str(update.optimizer)
            return words("guard.no_update", n=n, optimizer=optimizer, why=why)
    return None


def update_notes(baseline: GuardRecord, candidate: GuardRecord) -> Iterator[str]:
    """Yield what the reader must know about updates that were not compared."""
    for gap in candidate.update_gaps or baseline.update_gaps:
        yield words("guard.gap", why=gap)
    strange = sorted(_strange(baseline))
    for number in strange:
        yield words("guard.gap_strange", n=str(number))
    steps = [norms[1] for item in candidate.updates for norms in item.tensors.values()]
    if steps and not any(steps):
        yield words("guard.gap_zero")
    if not candidate.updates and not candidate.update_gaps:
        yield words("guard.gap_none")


def _strange(baseline: GuardRecord) -> set[int]:
    """Return the optimizers whose baseline does not do what its class and settings say."""
    return {
        update.optimizer
        for update in baseline.updates
        if any(excess(*norms) > UPDATE_LIMIT for norms in update.tensors.values())
    }
