"""Sketches of gradients before clipping and at the step, taken in the training process."""

from collections.abc import Mapping

import torch

from flatout.agent.guard.record import AT_STEP, BEFORE_CLIP, UPDATE, GradientSet, Numbers
from flatout.agent.guard.sketches import EarlySteps, sketch, to_numbers

BY_HAND = 0
"""Number given to the updates of a script that has no optimizer."""


class GradientNotes:
    """The gradients of the first steps of every optimizer, as sketches on their device."""

    def __init__(self, steps: int, early: EarlySteps | None = None) -> None:
        self._steps = steps
        self._early = early or EarlySteps()
        self._latest: dict[str, torch.Tensor] = {}
        self._start: dict[str, torch.Tensor] = {}
        self._sets: list[tuple[int, int, str, bool, dict[str, torch.Tensor]]] = []
        self._counts: dict[int, int] = {}
        self._moved = False
        self._latest_moved = False
        self._is_kept = False

    def after_backward(self, named: Mapping[str, torch.nn.Parameter], scale: float) -> None:
        """Sketch every gradient that exists now; the last backward before a step stays."""
        if self._counts and min(self._counts.values()) >= self._steps and self._all_seen(named):
            return
        self._latest_moved = self._moved
        self._latest = self._sketched(named, scale)

    def before_step(
        self,
        number: int,
        step: int,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.nn.Parameter],
    ) -> None:
        """Keep the gradients that a step begins with, and what its parameters were at the first."""
        self._is_kept = step <= self._steps
        if not self._is_kept:
            return
        own = _own(optimizer, named)
        if step == 1:
            self._start |= {name: sketch(value, name) for name, value in own.items()}
        self._keep(number, step, AT_STEP, self._sketched(own, scale_at_step(optimizer)))

    def after_step(
        self,
        number: int,
        step: int,
        optimizer: torch.optim.Optimizer,
        named: Mapping[str, torch.nn.Parameter],
        *,
        backwards_inside: int,
    ) -> None:
        """Settle the step: a closure that ran backward once made its gradients inside."""
        self._counts[number] = step
        if self._is_kept:
            own = _own(optimizer, named)
            if backwards_inside:
                self._sets.pop()
            if backwards_inside == 1:
                self._keep(number, step, AT_STEP, self._sketched(own, scale_at_step(optimizer)))
            before_clip = {name: self._latest[name] for name in own if name in self._latest}
            self._keep(number, step, BEFORE_CLIP, before_clip)
        self._moved = True

    def forget(self) -> None:
        """Take a step back that had no gradients: nothing was updated."""
        if self._is_kept:
            self._sets.pop()

    def by_hand(self, named: Mapping[str, torch.nn.Parameter]) -> None:
        """Take each backward for a step: the script updates its parameters itself."""
        step = self._counts[BY_HAND] = self._counts.get(BY_HAND, 0) + 1
        if step > self._steps:
            return
        values = {name: sketch(value, name) for name, value in named.items()}
        if step == 1:
            self._start = values
        if step == 2:
            update = {name: value - self._start[name] for name, value in values.items()}
            self._sets.append((BY_HAND, 1, UPDATE, False, update))
        self._keep(BY_HAND, step, BEFORE_CLIP, self._latest)
        self._moved = True

    def start(self) -> dict[str, Numbers]:
        """Return the parameters before their first step."""
        return _numbers(self._start)

    def sets(self) -> tuple[GradientSet, ...]:
        """Return every set that was kept."""
        return tuple(
            GradientSet(
                optimizer=number, step=step, point=point, moved=moved, sketches=_numbers(sketches)
            )
            for number, step, point, moved, sketches in self._sets
        )

    def _keep(self, number: int, step: int, point: str, sketches: dict[str, torch.Tensor]) -> None:
        self._sets.append((number, step, point, self._latest_moved, sketches))

    def _sketched(
        self, named: Mapping[str, torch.nn.Parameter], scale: float
    ) -> dict[str, torch.Tensor]:
        return {
            name: sketch(gradient, name) / scale
            for name, parameter in named.items()
            if (gradient := self._early.gradient(parameter)) is not None
        }

    def _all_seen(self, named: Mapping[str, torch.nn.Parameter]) -> bool:
        """Return whether every parameter already belongs to a set of the last step kept."""
        done = {name for _, step, _, _, kept in self._sets if step == self._steps for name in kept}
        return all(name in done for name, value in named.items() if value.grad is not None)


def scale_at_step(optimizer: torch.optim.Optimizer) -> float:
    """Return what the gradients must still be divided by when the step begins.

    A fused optimizer gets the gradient scaler's scale handed over and divides on its own; for all
    others the scaler has divided before.
    """
    scale = getattr(optimizer, "grad_scale", None)
    return float(scale) if scale is not None else 1.0


def _own(
    optimizer: torch.optim.Optimizer, named: Mapping[str, torch.nn.Parameter]
) -> dict[str, torch.nn.Parameter]:
    own = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in named.items() if id(parameter) in own}


def _numbers(sketches: Mapping[str, torch.Tensor]) -> dict[str, Numbers]:
    return {name: to_numbers(value) for name, value in sketches.items()}
