"""The step seam: backward, the loss it is given, and saving in between."""

import functools
import weakref
from typing import Any

from flatout.seams import clock as phases
from flatout.seams.session import Session

MAX_LOSS_TERMS = 64
"""Losses kept per segment; a script with more accumulates, and their sum is scaled up."""


def install(session: Session) -> None:
    """Listen to backward, to the gradient scaler and to `torch.save`."""
    _Backward(session).install()
    _hook_save(session)


class _Backward:
    """Replace `torch.autograd.backward`; `Tensor.backward` goes through it too."""

    def __init__(self, session: Session) -> None:
        import torch

        self.torch = torch
        self.session = session
        self.unscaled: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def install(self) -> None:
        torch, session = self.torch, self.session
        backward, scale = torch.autograd.backward, torch.amp.GradScaler.scale
        is_compiling = torch.compiler.is_compiling

        @functools.wraps(backward)
        def listened(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not session.is_mine():
                return backward(tensors, *args, **kwargs)
            is_outermost = phases.BACKWARD not in session.clock.stack
            if is_outermost and session.is_recording:
                saw_loss(tensors)
            session.clock.push(phases.BACKWARD)
            try:
                return backward(tensors, *args, **kwargs)
            finally:
                session.clock.pop()
                if is_outermost:
                    session.beat()
                    session.fire("backward_end")
                    if not session.optimizers:
                        session.end_segment(-1)

        @functools.wraps(scale)
        def scaled(scaler: Any, outputs: Any) -> Any:
            result = scale(scaler, outputs)
            if isinstance(result, torch.Tensor) and session.is_mine():
                self.unscaled[result] = outputs.detach()
                session.scaler = scaler
            return result

        saw_loss = session.quietly(self.saw_loss)
        torch.autograd.backward = listened
        torch.amp.GradScaler.scale = scaled

    def saw_loss(self, tensors: Any) -> None:
        """Keep the loss: a clone, since a view would keep its base alive; read at the end only."""
        segment = self.session.segment
        segment.backwards += 1
        loss = tensors if isinstance(tensors, self.torch.Tensor) else None
        if loss is None and len(tensors) == 1:
            loss = tensors[0]
        if loss is None or loss.numel() != 1:
            self.session.note_error("backward on a tensor that is no scalar: no loss recorded")
            return
        loss = self.unscaled.get(loss, loss)
        if len(segment.losses) < MAX_LOSS_TERMS:
            segment.losses.append(loss.detach().clone())
        self.session.fire("loss", loss)


def _hook_save(session: Session) -> None:
    """Give saving a phase of its own, so that a step with a checkpoint is not a steady one."""
    import torch

    save = torch.save

    @functools.wraps(save)
    def timed(*args: Any, **kwargs: Any) -> Any:
        if not session.is_mine():
            return save(*args, **kwargs)
        session.clock.push(phases.SAVE)
        try:
            return save(*args, **kwargs)
        finally:
            session.clock.pop()

    torch.save = timed
