"""Steps made inside backward: who wants to see a gradient before it is used up and gone."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Listener = Callable[["torch.nn.Parameter"], None]
_LISTENERS: list[Listener] = []


def listen(listener: Listener) -> None:
    """Call `listener` with each parameter that is about to be updated inside backward."""
    _LISTENERS.append(listener)


def tell(parameter: "torch.nn.Parameter") -> None:
    """Say that a parameter is updated now, with the gradient that it has."""
    for listener in _LISTENERS:
        listener(parameter)
