"""The optimizer hook point: which optimizers exist, and where their steps begin and end.

`keep`, `find` and `forget` hold what an optimizer loads besides torch's own parts, for the
technique that wrote it.
"""

import functools
import inspect
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from flatout.agent import patching
from flatout.agent.session import Session
from flatout.records import phase_clock as phases

if TYPE_CHECKING:
    import torch

OF_TORCH = ("state", "param_groups")
_KEPT: "weakref.WeakKeyDictionary[Any, tuple[Any, dict[str, Any]]]" = weakref.WeakKeyDictionary()
"""By optimizer the handle of its hook, and the parts that it loaded last."""


def keep(optimizer: "torch.optim.Optimizer") -> None:
    """Keep such parts of what an optimizer loads, until they are forgotten.

    A script loads its optimizer before the first step, and techniques act in that step: by then
    torch has passed over what it does not know.
    """
    _KEPT[optimizer] = optimizer.register_load_state_dict_pre_hook(_note), {}


def find(optimizer: "torch.optim.Optimizer", name: str) -> Any | None:
    """Return a part of what an optimizer loaded last, or None."""
    _, parts = _KEPT.get(optimizer, (None, {}))
    return parts.get(name)


def forget(optimizer: "torch.optim.Optimizer") -> None:
    """Let the parts go, and keep none from now on: who needs them has them."""
    handle, _ = _KEPT.pop(optimizer, (None, {}))
    if handle is not None:
        handle.remove()


def _note(optimizer: "torch.optim.Optimizer", state: dict[str, Any]) -> None:
    if optimizer in _KEPT:
        handle, _ = _KEPT[optimizer]
        _KEPT[optimizer] = handle, {k: v for k, v in state.items() if k not in OF_TORCH}


READY = "_flatout_ready"
"""Its number, set on an optimizer once the recipe was applied to it."""


def install(session: Session) -> None:
    """Listen to every optimizer built from now on and transform it before its first step."""
    from torch.optim import optimizer

    session.steps = _Steps(session)
    session.steps.install(optimizer)


class _Steps:
    """Torch's global step hooks see subclasses, GradScaler, Accelerate and Lightning alike."""

    def __init__(self, session: Session) -> None:
        import torch

        self.session = session
        self.latest = (-1, 0, False)
        """Of the latest step the optimizer, its first parameter, whether there was a backward."""
        # Dynamo's question alone, half of `is_compiling`: no export traces an optimizer.
        self.is_compiling = torch.compiler.is_dynamo_compiling

    def install(self, module: Any) -> None:
        session = self.session
        patching.wrap(module.Optimizer, "__init__", self.remembering)
        handle = module.register_optimizer_step_pre_hook(self.before)
        module.register_optimizer_step_post_hook(self.after)
        hooks: dict[int, Any] = handle.hooks_dict_ref()

        def listen_again() -> None:
            hooks[handle.id] = self.before

        # Of a skipped step only the end is listened to.
        session.on("skipping", lambda: hooks.pop(handle.id, None))
        session.on("sampling", listen_again)

    def remembering(self, build: Callable[..., Any]) -> Callable[..., Any]:
        """Return the constructor, with what it builds added to the session."""
        session = self.session
        keeps_parts = session.touches("optimizer")

        @functools.wraps(build)
        def construct(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            build(optimizer, *args, **kwargs)
            if session.is_mine():
                session.add_optimizer(optimizer)
                if keeps_parts:
                    session.quietly(keep)(optimizer)

        return construct

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> Any:
        """A step begins, possibly inside another one's closure; return other arguments, or None."""
        if self.is_compiling():
            return None
        session = self.session
        stack = session.clock.stack
        if get_ident() != session.thread:
            if phases.BACKWARD in stack:  # autograd's, which the training's thread waits for
                self.note_inside(optimizer)
            return None
        while phases.OPTIMIZER in stack and not _is_inner():
            # A step raised, and the script went on: what it was given counts for the next one.
            _leave_step(session.clock)
            session.segment.closures = 0
        is_outermost = phases.OPTIMIZER not in stack
        self.prepare(optimizer)
        if is_outermost and phases.BACKWARD in stack:
            self.note_inside(optimizer)
        if is_outermost and session.listeners["before_step"]:
            session.fire("before_step", optimizer)
        session.clock.push(phases.OPTIMIZER)
        return self.counting(args, kwargs) if is_outermost else None

    def prepare(self, optimizer: Any) -> int:
        """Apply the recipe to an optimizer at its first step; return its number."""
        session = self.session
        number: int | None = optimizer.__dict__.get(READY)
        if number is None:
            if session.number_of(optimizer) < 0:
                self.add_unbuilt(optimizer)
            number = optimizer.__dict__[READY] = session.number_of(optimizer)
            session.note_optimizer(optimizer)
            session.quietly(self.check_roots)(optimizer)
            session.transform("optimizer", optimizer)
            forget(optimizer)
        return number

    def add_unbuilt(self, optimizer: Any) -> None:
        """Add an optimizer whose building no one heard: a copy, a restored one, an earlier one.

        Until its first step each backward seemed to end one, where no other was known.
        """
        session = self.session
        if {*session.counts} == {-1} and not session.in_backward:
            session.forget()
        session.add_optimizer(optimizer)

    def note_inside(self, optimizer: Any) -> None:
        """Note an optimizer that steps inside backward, whose end is then that of the step.

        Hooks on gradients run in the thread that goes backward: on the CPU the one that trains, on
        CUDA one of autograd's for each device, where the clock is left alone.
        """
        self.session.in_backward.add(self.prepare(optimizer))
        self.session.stepped_inside = True

    def counting(self, args: Any, kwargs: Any) -> Any:
        """Return the arguments of a step with a closure that is counted; None without one.

        An object that can be called, as a model is, may be there for more than that.
        """
        named = kwargs.get("closure")
        closure = named or (args[1] if len(args) > 1 else None)
        if not (inspect.isroutine(closure) or isinstance(closure, functools.partial)):
            return None
        segment = self.session.segment

        @functools.wraps(closure)
        def counted(*given: Any, **named_ones: Any) -> Any:
            segment.closures += 1
            return closure(*given, **named_ones)  # an optimizer of the script's own may give some

        if named is not None:
            return args, {**kwargs, "closure": counted}
        return (args[0], counted, *args[2:]), kwargs

    def check_roots(self, optimizer: Any) -> None:
        """Note an optimizer that trains none of the roots: its model came after the search."""
        session = self.session
        if not (session.knows_roots and session.root_count):
            return
        found = {id(p) for root in session.roots for p in root.parameters()}
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        session.trains_unseen |= found.isdisjoint(own)

    def after(self, optimizer: Any, _args: Any, _kwargs: Any) -> None:
        """A step has ended; the outermost one ends the segment."""
        session = self.session
        if self.is_compiling() or get_ident() != session.thread:
            return
        stack = session.clock.stack
        if phases.OPTIMIZER not in stack:
            self.ended_unseen(optimizer)
            return
        _leave_step(session.clock)
        if phases.OPTIMIZER in stack:
            return
        if session.listeners["after_step"]:
            session.fire("after_step", optimizer)
        if not (session.is_marked or phases.BACKWARD in stack or self.goes_on(optimizer)):
            session.end_segment(optimizer.__dict__[READY])

    def goes_on(self, optimizer: Any) -> bool:
        """Return whether a step belongs to the one before it: it only updates other parameters.

        DeepSpeed's ZeRO makes one for each group. A step for which nothing was computed in Python,
        as with a graph that is played again, updates those of the one before.
        """
        number, (latest, updated, had_backward) = optimizer.__dict__[READY], self.latest
        own = next((id(p) for g in optimizer.param_groups for p in g["params"]), 0)
        segment = self.session.segment
        is_new = segment.backwards or segment.batches or segment.calls or segment.evals
        goes_on = not is_new and had_backward and latest == number and updated != own
        self.latest = number, own, goes_on or segment.backwards > 0
        return goes_on

    def ended_unseen(self, optimizer: Any) -> None:
        """A step has ended whose begin was not listened to.

        The session began inside it, or it is skipped: then the one that ends steps counts, which
        may have called others. One that never stepped before begins another training.
        """
        session, sampler = self.session, self.session.sampler
        if not sampler.skips_left or session.is_marked:
            return
        number = optimizer.__dict__.get(READY)
        if number is None:
            number = self.prepare(optimizer)
            sampler.end_skipping()
        elif number not in session.counts or (number == sampler.who and sampler.note_end()):
            return
        session.end_segment(number)


def _is_inner() -> bool:
    """Return whether the step that begins is made within another one, which still runs."""
    frame = sys._getframe(2)  # torch's, around every step: it calls the hook, which asks
    around = frame.f_back
    while around is not None and around.f_code is not frame.f_code:
        around = around.f_back
    return around is not None


def _leave_step(clock: phases.Clock) -> None:
    """Go back to the phase around a step."""
    while clock.stack[-1] != phases.OPTIMIZER:
        clock.pop()  # an exception in a closure left its phases behind
    clock.pop()
