"""The optimizer seam: which optimizers exist, and where their steps begin and end."""

import functools
import weakref
from typing import Any

from flatout.seams import clock as phases
from flatout.seams.session import Session

READY = "_flatout_ready"


def install(session: Session) -> None:
    """Listen to every optimizer built from now on and transform it before its first step."""
    import torch
    from torch.optim import optimizer as module

    build = module.Optimizer.__init__
    is_compiling = torch.compiler.is_compiling

    @functools.wraps(build)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        build(optimizer, *args, **kwargs)
        if session.is_mine():
            session.add_optimizer(weakref.ref(optimizer))

    def before(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling() or not session.is_mine():
            return
        is_outermost = phases.OPTIMIZER not in session.clock.stack
        if READY not in optimizer.__dict__:
            optimizer.__dict__[READY] = True
            session.note_optimizer(optimizer)
            session.transform("optimizer", optimizer)
        if is_outermost:
            session.fire("before_step", optimizer)
        session.clock.push(phases.OPTIMIZER)

    def after(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        if is_compiling() or not session.is_mine():
            return
        if phases.OPTIMIZER not in session.clock.stack:
            return  # the session began inside this step
        while session.clock.stack[-1] != phases.OPTIMIZER:
            session.clock.pop()  # an exception in a closure left its phases behind
        session.clock.pop()
        if phases.OPTIMIZER in session.clock.stack:
            return
        session.fire("after_step", optimizer)
        session.end_segment(session.number_of(optimizer))

    module.Optimizer.__init__ = __init__  # type: ignore[method-assign]
    module.register_optimizer_step_pre_hook(before)
    module.register_optimizer_step_post_hook(after)
