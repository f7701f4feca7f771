"""Let a live optimizer become one of another class: the same object, groups and parameters.

Scripts hold on to their optimizer, and so do their schedulers: it cannot be replaced, only changed
(`find_obstacle`, `become`). `need`, `part` and their kin note who needs an optimizer's steps whole,
and which optimizers make theirs in parts.
"""

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from flatout.records.errors import NotApplicable

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
            "each parameter is updated in the backward pass: no step is left to act around"
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
    """Note that an optimizer makes its steps in parts from now on.

    A technique that acts before or after a step (other rates, other weights, part of the
    parameters) does nothing where another one updates each parameter in backward: by the time of
    the step all is done. Whichever comes second is refused, so that a recipe never says of a
    technique what it did not do.
    """
    _PARTED.add(optimizer)


def join(optimizer: Any) -> None:
    """Note that an optimizer makes its steps at once again."""
    _PARTED.discard(optimizer)


ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Classes with two moments and steps whose length is the learning rate."""
_SUCCESSORS: "weakref.WeakKeyDictionary[Optimizer, type[Optimizer]]" = weakref.WeakKeyDictionary()
"""By optimizer the class that it became, or becomes at the end of the step that runs."""


def find_obstacle(optimizer: Optimizer, *loadable: str) -> str | None:
    """Return why an optimizer cannot become another one now, or None.

    It has made no step, but its state may have been loaded. The new class can go on from that where
    each parameter's state has one of the `loadable` names.
    """
    return next(_obstacles(optimizer, loadable), None)


def _obstacles(optimizer: Optimizer, loadable: tuple[str, ...]) -> Iterator[str]:
    kind = find_successor(optimizer) or type(optimizer)
    if kind not in ADAM:
        yield f"it takes the place of Adam and AdamW, this is {kind.__module__}.{kind.__name__}"
    if not all(any(name in state for name in loadable) for state in optimizer.state.values()):
        yield "the optimizer made a step or was loaded already: its state is laid out otherwise"
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        yield "something else runs in place of the optimizer's step already"
    if _is_fused(optimizer) or _has(optimizer, "amsgrad"):
        yield "its steps are fused or amsgrad ones, by the script or by a technique before this one"
    if _has(optimizer, "maximize"):
        yield "the script maximises, which not every optimizer can"
    if any(p.is_complex() for group in optimizer.param_groups for p in group["params"]):
        yield "it has complex parameters, which not every optimizer takes"


def _is_fused(optimizer: Optimizer) -> bool:
    # GradScaler leaves unscaling, and the skipping of steps, to whoever has this flag.
    is_flagged = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    return is_flagged or _has(optimizer, "fused")


def _has(optimizer: Optimizer, option: str) -> bool:
    return any(group.get(option) for group in optimizer.param_groups)


def find_successor(optimizer: Optimizer) -> type[Optimizer] | None:
    """Return the class that a technique put in the place of the optimizer's own, or None."""
    return _SUCCESSORS.get(optimizer)


Hook = Callable[..., None]


def nothing(*_: Any) -> None:
    """Do nothing before or after a step."""


def become(
    optimizer: Optimizer,
    kind: type[Optimizer],
    settings: Mapping[str, Any],
    *,
    convert: Hook = nothing,
    prepare: Hook = nothing,
    finish: Hook = nothing,
) -> None:
    """Change the class of an optimizer, before its first step or where that begins.

    A step that is running belongs to the old class: it finds no parameters, and when it is over the
    new class makes it.

    Args:
        optimizer: Changed in place.
        kind: The new class.
        settings: What its groups need; replaces what they have under these names.
        convert: Called once with the optimizer when it is of the new class; a state that it has was
            loaded into the old one.
        prepare: Called with the optimizer before each step.
        finish: Called with the optimizer after each step.
    """
    need(optimizer, f"{kind.__name__}, which takes the optimizer's place,")
    _SUCCESSORS[optimizer] = kind
    if not _is_stepping(optimizer):
        _change(optimizer, kind, settings)
        convert(optimizer)
    else:
        first = _FirstStep(optimizer, kind, settings, convert)
        act_around_steps(optimizer, first.hide, lambda *_: first.make(prepare, finish))
    act_around_steps(optimizer, prepare, finish)


def act_around_steps(optimizer: Optimizer, before: Hook, after: Hook) -> None:
    """Act before and after each step, inside of those who do so already.

    Torch calls both in the order in which they came. Of two that set a rate for a step and put back
    what they found, the later one would put back what the earlier one had set.
    """
    optimizer.register_step_pre_hook(before)
    handle = optimizer.register_step_post_hook(after)
    hooks: Any = handle.hooks_dict_ref()
    hooks.move_to_end(handle.id, last=False)


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without the hooks around it: no one hears of it."""
    step: Any = kind.step
    if not getattr(step, "hooked", False):
        return kind.step
    bare: Callable[..., Any] = step.__wrapped__
    return bare


def _is_stepping(optimizer: Optimizer) -> bool:
    frame: Any = sys._getframe(1)
    while frame is not None:
        is_step = frame.f_globals.get("__name__") == Optimizer.__module__
        if is_step and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def _change(optimizer: Optimizer, kind: type[Optimizer], settings: Mapping[str, Any]) -> None:
    optimizer.__class__ = kind
    optimizer._patch_step_function()  # the constructor would: step hooks live there
    for group in [*optimizer.param_groups, optimizer.defaults]:
        group.update(settings)
    _renew_step(optimizer, kind)


def _renew_step(optimizer: Optimizer, kind: type[Optimizer]) -> None:
    """Renew what a scheduler put in place of the step: it is bound to the old class."""
    if "step" not in vars(optimizer):
        return

    @functools.wraps(kind.step)
    def step(*args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # the scheduler looks at it
        return kind.step(optimizer, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign]


class _FirstStep:
    """The step in which an optimizer changes its class."""

    def __init__(
        self,
        optimizer: Optimizer,
        kind: type[Optimizer],
        settings: Mapping[str, Any],
        convert: Hook,
    ) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self.settings = settings
        self.convert = convert
        self.groups: list[dict[str, Any]] = []
        self.is_begun = False
        self.is_over = False

    def hide(self, *_: Any) -> None:
        """Let the old class step over nothing: it would make a state of its own."""
        if not self.is_begun:
            self.is_begun = True
            self.groups, self.optimizer.param_groups = self.optimizer.param_groups, []

    def make(self, prepare: Hook, finish: Hook) -> None:
        """Change the class and make the step in its name."""
        if self.is_over:
            return
        self.is_over = True
        optimizer = self.optimizer
        optimizer.param_groups = self.groups
        _change(optimizer, self.kind, self.settings)
        self.convert(optimizer)
        prepare(optimizer)
        bare_step(self.kind)(optimizer)
        finish(optimizer)
