"""Gradients that were used up inside backward, for a guard that would look at them afterwards."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from flatout.seams import early

if TYPE_CHECKING:
    import torch


class EarlySteps:
    """Copies of each parameter and its gradient, taken just before backward updated it."""

    def __init__(self, is_wanted: Callable[[], bool] = lambda: False) -> None:
        """Take copies while they are wanted: they cost as much memory as the model."""
        self._is_wanted = is_wanted
        self._seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._updated: set[int] = set()

    def listen(self) -> None:
        """Begin to take copies."""
        early.listen(self._on_update)

    def gradient(self, parameter: "torch.nn.Parameter") -> "torch.Tensor | None":
        """Return the gradient of the step to come, used up or not."""
        if parameter.grad is None and id(parameter) in self._seen:
            return self._seen[id(parameter)][1]
        return parameter.grad

    def has_gradient(self, parameter: "torch.nn.Parameter") -> bool:
        """Tell whether the step to come has a gradient for it, copied or not."""
        return parameter.grad is not None or id(parameter) in self._updated

    def before(self, parameter: "torch.nn.Parameter") -> "torch.Tensor":
        """Return what the parameter was before the step to come."""
        if id(parameter) in self._seen:
            return self._seen[id(parameter)][0]
        return parameter.detach()

    def forget(self) -> None:
        """Drop the copies: their step is over."""
        self._seen.clear()
        self._updated.clear()

    def _on_update(self, parameter: "torch.nn.Parameter") -> None:
        self._updated.add(id(parameter))
        if self._is_wanted() and parameter.grad is not None:
            self._seen[id(parameter)] = (
                parameter.detach().clone(),
                parameter.grad.detach().clone(),
            )
