"""Who needs an optimizer's steps whole, and which optimizers make theirs in parts.

A lever that acts before or after a step (other rates, other weights, part of the parameters) does
nothing where another one updates each parameter in backward: by the time of the step all is done.
Whichever comes second is refused, so that a recipe never says of a lever what it did not do.
"""

import weakref
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from flatout.core.errors import NotApplicable

_NEEDED: "weakref.WeakKeyDictionary[Any, str]" = weakref.WeakKeyDictionary()
"""By optimizer who acts around its steps."""
_OF_ALL: list[str] = []
"""Who acts around the steps of every optimizer."""
_OF_PARAMETERS: "MutableMapping[torch.Tensor, str]" = WeakIdKeyDictionary()
"""By parameter who acts around the steps of whichever optimizer updates it."""
_PARTED: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Optimizers that step for each parameter in backward."""


def need(optimizer: Any, who: str) -> None:
    """Note who acts around an optimizer's steps.

    Raises:
        NotApplicable: if it makes its steps in parts.
    """
    if optimizer in _PARTED:
        raise NotApplicable(
            "optimizer_in_backward updates each parameter by itself: no step is left to act around"
        )
    _NEEDED.setdefault(optimizer, who)


def need_all(who: str) -> None:
    """Note who acts around the steps of every optimizer from now on.

    Raises:
        NotApplicable: if one makes its steps in parts already.
    """
    for optimizer in list(_PARTED):
        need(optimizer, who)
    _OF_ALL.append(who)


def need_of(parameters: Sequence[torch.Tensor], who: str) -> None:
    """Note who acts around the steps of whichever optimizers update these parameters.

    Raises:
        NotApplicable: if one makes its steps in parts already.
    """
    concerned = {id(parameter) for parameter in parameters}
    for optimizer in list(_PARTED):
        if any(id(parameter) in concerned for parameter in _parameters(optimizer)):
            need(optimizer, who)
    for parameter in parameters:
        _OF_PARAMETERS[parameter] = who


def find_need(optimizer: Any) -> str | None:
    """Return who acts around an optimizer's steps, or None."""
    of_parameters = (_OF_PARAMETERS.get(parameter) for parameter in _parameters(optimizer))
    return (
        _NEEDED.get(optimizer)
        or next(iter(_OF_ALL), None)
        or next((who for who in of_parameters if who is not None), None)
    )


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def part(optimizer: Any) -> None:
    """Note that an optimizer makes its steps in parts from now on."""
    _PARTED.add(optimizer)


def join(optimizer: Any) -> None:
    """Note that an optimizer makes its steps at once again."""
    _PARTED.discard(optimizer)
