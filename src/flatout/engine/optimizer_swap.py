"""Let a live optimizer become one of another class: the same object, groups and parameters.

Scripts hold on to their optimizer, and so do their schedulers: it cannot be replaced, only changed.
"""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from flatout.engine import whole_steps

ADAM = (torch.optim.Adam, torch.optim.AdamW)
"""Classes with two moments and steps whose length is the learning rate."""


def find_obstacle(optimizer: Optimizer) -> str | None:
    """Return why an optimizer cannot become another one now, or None."""
    return next(_obstacles(optimizer), None)


def _obstacles(optimizer: Optimizer) -> Iterator[str]:
    kind = type(optimizer)
    if kind not in ADAM:
        yield f"it takes the place of Adam and AdamW, this is {kind.__module__}.{kind.__name__}"
    if len(optimizer.state):
        yield "the optimizer made a step or was loaded already: its state is laid out otherwise"
    own_step = vars(optimizer).get("step")
    if own_step is not None and not hasattr(own_step, "_wrapped_by_lr_sched"):
        yield "something else runs in place of the optimizer's step already"
    if any(group.get("fused") or group.get("amsgrad") for group in optimizer.param_groups):
        yield "the script chose a fused or amsgrad step itself"
    if any(group.get("maximize") for group in optimizer.param_groups):
        yield "the script maximises, which not every optimizer can"


Hook = Callable[..., None]


def nothing(*_: Any) -> None:
    """Do nothing before or after a step."""


def become(
    optimizer: Optimizer,
    kind: type[Optimizer],
    settings: Mapping[str, Any],
    *,
    prepare: Hook = nothing,
    finish: Hook = nothing,
) -> None:
    """Change the class of an optimizer without state, before its first step or where that begins.

    A step that is running belongs to the old class: it finds no parameters, and when it is over the
    new class makes it.

    Args:
        optimizer: Changed in place.
        kind: The new class.
        settings: What its groups need; replaces what they have under these names.
        prepare: Called with the optimizer before each step.
        finish: Called with the optimizer after each step.
    """
    whole_steps.need(optimizer, f"{kind.__name__}, which takes the optimizer's place,")
    if not _is_stepping(optimizer):
        _change(optimizer, kind, settings)
        optimizer.register_step_pre_hook(prepare)
        optimizer.register_step_post_hook(finish)
        return
    first = _FirstStep(optimizer, kind, settings)
    optimizer.register_step_pre_hook(first.hide)
    optimizer.register_step_pre_hook(prepare)
    optimizer.register_step_post_hook(lambda *_: first.make(prepare, finish))
    optimizer.register_step_post_hook(finish)


def bare_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """Return the step of a class without the hooks around it: nobody hears of it."""
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
        self, optimizer: Optimizer, kind: type[Optimizer], settings: Mapping[str, Any]
    ) -> None:
        self.optimizer = optimizer
        self.kind = kind
        self.settings = settings
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
        prepare(optimizer)
        bare_step(self.kind)(optimizer)
        finish(optimizer)
