"""The step hook point: backward, the loss it is given, the script's own marks, and saving."""

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

from flatout.agent import patching
from flatout.agent.events import ELSEWHERE, leave_note
from flatout.agent.marks import STEP
from flatout.agent.patching import named
from flatout.agent.session import Session
from flatout.records import phase_clock as phases

MAX_LOSS_TERMS = 64
"""Losses kept per segment; what a script with more accumulates is added to the last of them."""

CREATE_GRAPH = 4
"""Place of `create_graph` among the arguments of `torch.autograd.grad`."""
MARKED = -2
"""Stands for the optimizer of a segment that `flatout.step` ended."""


def install(session: Session) -> None:
    """Listen to backward, to the gradient scaler, to `flatout.step` and to `torch.save`."""
    _Backward(session).install()
    _hook_marks(session)
    _hook_save(session)


class _Backward:
    """Replace `torch.autograd.backward`; `Tensor.backward` goes through it too."""

    def __init__(self, session: Session) -> None:
        import torch
        from torch.utils.weak import WeakTensorKeyDictionary

        self.torch = torch
        self.session = session
        # By identity: a dictionary that compares tensors would wait for the device.
        self.unscaled: Any = WeakTensorKeyDictionary()
        self.outermost: Any = None
        """What runs an outermost backward, once the recipe was asked."""
        session.unscaled = self.unscaled

    def install(self) -> None:
        """Stand in for backward, for `torch.autograd.grad` and for the gradient scaler."""
        torch = self.torch
        backward = patching.wrap(torch.autograd, "backward", self.listen)
        self.session.on("skipping", backward.undo)
        self.session.on("sampling", backward.apply)
        patching.wrap(torch.autograd, "grad", self.differentiate)
        patching.wrap(torch.amp.GradScaler, "scale", self.scale)

    def listen(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward in a phase of its own; an outermost one goes through the recipe."""
        session, is_tracing = self.session, self.torch.compiler.is_dynamo_compiling
        saw_loss = session.quietly(self.saw_loss)

        @functools.wraps(backward)
        def listened(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_tracing():
                return backward(tensors, *args, **kwargs)
            if get_ident() != session.thread:
                self.note_elsewhere()
                return backward(tensors, *args, **kwargs)
            if session.sampler.skips_left and not session.listeners["backward"]:
                return (self.outermost or backward)(tensors, *args, **kwargs)
            is_outermost = phases.BACKWARD not in session.clock.stack
            if is_outermost:
                saw_loss(tensors)
            if is_outermost and session.listeners["backward"]:
                session.fire("backward", tensors)
            run = (self.outermost or self.through_recipe(backward)) if is_outermost else backward
            session.clock.push(phases.BACKWARD)
            try:
                return run(tensors, *args, **kwargs)
            finally:
                session.clock.pop()
                if is_outermost:
                    self.ended()

        return listened

    def note_elsewhere(self) -> None:
        """Note that another thread trains; a file tells it where this process is cut short."""
        if self.session.trains_elsewhere:
            return
        self.session.trains_elsewhere = True
        leave_note(self.session.spec.folder, ELSEWHERE, {})

    def ended(self) -> None:
        """Tell of the end of a backward; without an optimizer outside of it, it ends the step."""
        session = self.session
        session.beat()
        if session.listeners["backward_end"]:
            session.fire("backward_end")
        steps_inside, session.stepped_inside = session.stepped_inside, False
        if not session.is_marked and (steps_inside or not session.optimizers):
            session.end_segment(-1)

    def through_recipe(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        """Return the backward as the recipe wants it; the techniques are asked once."""
        if self.outermost is None:
            self.outermost = self.session.transform("backward", backward)
        return self.outermost  # type: ignore[no-any-return]

    def scale(self, scale: Callable[..., Any]) -> Callable[..., Any]:
        """Return `GradScaler.scale` with the loss it was given remembered."""
        torch, session = self.torch, self.session

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, torch.Tensor) and session.is_mine():
                self.unscaled[result] = outputs.detach()
                session.scaler = scaler
            return result

        return scaled

    def differentiate(self, grad: Callable[..., Any]) -> Callable[..., Any]:
        """Return `torch.autograd.grad` as a backward; it ends a step where no optimizer will.

        Only that of one scalar whose graph is not kept for further derivatives: penalties and
        forces are part of a step.
        """
        torch, session = self.torch, self.session
        saw_loss = session.quietly(self.saw_loss)

        def is_update(outputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
            keeps_graph = kwargs.get(
                "create_graph", len(args) > CREATE_GRAPH and args[CREATE_GRAPH]
            )
            if session.optimizers or keeps_graph:
                return False
            return isinstance(outputs, torch.Tensor) and outputs.numel() == 1

        @functools.wraps(grad)
        def differentiated(*args: Any, **kwargs: Any) -> Any:
            is_inner = phases.BACKWARD in session.clock.stack
            if torch.compiler.is_compiling() or not session.is_mine() or is_inner:
                return grad(*args, **kwargs)
            outputs = args[0] if args else kwargs.get("outputs")
            session.note_used_graphs()
            ends_step = is_update(outputs, args, kwargs)
            if ends_step:
                saw_loss(outputs)
            session.clock.push(phases.BACKWARD)
            try:
                return grad(*args, **kwargs)
            finally:
                session.clock.pop()
                if ends_step:
                    self.ended()

        return differentiated

    def saw_loss(self, tensors: Any) -> None:
        """Count a backward and keep its loss, where steps are recorded; read at the end only."""
        segment = self.session.segment
        segment.backwards += 1
        if not self.session.is_recording:
            return
        loss = tensors if isinstance(tensors, self.torch.Tensor) else None
        if loss is None and len(tensors) == 1:
            loss = tensors[0]
        if loss is None or loss.numel() != 1 or loss.is_complex():
            self.session.note_error("backward on a tensor that is no real scalar: no loss recorded")
            return
        loss = self.unscaled.get(loss, loss)
        # A closure that the optimizer calls again gives the same samples' loss at other parameters.
        is_again = segment.closures > 1 and phases.OPTIMIZER in self.session.clock.stack
        if not is_again:
            # Reading costs less than a clone on the CPU and synchronises elsewhere; a view would
            # keep its base alive.
            term = loss.item() if loss.is_cpu else loss.detach().clone()
            if len(segment.losses) < MAX_LOSS_TERMS:
                segment.losses.append(term)
            else:
                segment.losses[-1] = segment.losses[-1] + term
        if self.session.listeners["loss"]:
            self.session.fire("loss", loss)


def _hook_marks(session: Session) -> None:
    """Let the script's own steps, of `flatout.step`, override those that were found."""
    depth = 0

    def began() -> None:
        """At the first mark, forget the steps that were found before it."""
        nonlocal depth
        if not session.is_mine():
            return
        depth += 1
        if not session.is_marked:
            session.is_marked = True
            session.forget()

    def ended(is_whole: bool) -> None:  # noqa: FBT001  called by position
        """End the step with its outermost block; one that an exception left is none."""
        nonlocal depth
        if not session.is_mine():
            return
        depth -= 1
        if depth == 0 and is_whole:
            session.beat()
            session.end_segment(MARKED)

    STEP.listen(began, ended)


def _hook_save(session: Session) -> None:
    """Give saving a phase of its own, so that a step with a checkpoint is not a steady one."""
    import torch

    def timing(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not session.is_mine():
                return save(*args, **kwargs)
            session.clock.push(phases.SAVE)
            try:
                return save(*args, **kwargs)
            finally:
                session.clock.pop()

        return named(timed, "torch", "save")

    patching.wrap(torch, "save", timing)
