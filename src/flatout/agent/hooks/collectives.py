"""The collective hook point: how long the training thread is in communication with other ranks.

Every collective of `torch.distributed` is timed on the host, and so is the end of a backward in
which DistributedDataParallel waits for its last bucket. With gloo that is the time in which the
rank did nothing else. With NCCL the calls return at once and the device waits: there only a
trace shows it.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from flatout.agent import patching
from flatout.agent.session import Session
from flatout.records import phase_clock as phases
from flatout.records.phase_clock import NAMES

COLLECTIVES = (
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "monitored_barrier",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "_broadcast_coalesced",
)
"""Functions that communicate; the last one is how DistributedDataParallel copies buffers."""


def install(session: Session) -> None:
    """Time the collectives of this process; without `torch.distributed` there are none."""
    c10d = sys.modules.get("torch.distributed.distributed_c10d")
    if c10d is None or not hasattr(c10d, "all_reduce"):
        return  # a torch built without it
    wait = _Wait(session)
    timed = functools.cache(wait.timed)  # what two modules share stays one function
    for name in COLLECTIVES:
        original = getattr(c10d, name, None)
        for module in (c10d, sys.modules["torch.distributed"]):
            if original is not None and getattr(module, name, None) is original:
                patching.wrap(module, name, timed)
    patching.wrap(c10d.Work, "wait", wait.timed)
    session.on("root", wait.follow_backward)


class _Wait:
    """Adds up the time in collectives by the phase in which they were called."""

    def __init__(self, session: Session) -> None:
        import torch

        self.torch = torch
        self.session = session
        self.depth = 0
        self.computed_at: float | None = None
        self.follows = False

    def follow_backward(self, _root: Any) -> None:
        """Listen to backward from the first root on, where there are other ranks by then."""
        if self.follows or not self.torch.distributed.is_initialized():
            return
        self.follows = True
        self.session.on("backward", self.mark_end_of_compute)
        self.session.on("backward_end", self.saw_backward_end)

    def timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function with its time noted; a collective inside another counts once."""
        session, is_compiling = self.session, self.torch.compiler.is_compiling

        @functools.wraps(original)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or self.depth or not session.is_mine():
                return original(*args, **kwargs)
            self.depth += 1
            began = session.clock.now()
            try:
                return original(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.computed_at is None:  # else the end of the backward counts it
                    self.add(session.clock.stack[-1], session.clock.now() - began)

        return timed

    def add(self, phase: int, seconds: float) -> None:
        """Note time in communication within a phase."""
        segment = self.session.segment
        if not segment.communication:
            segment.communication = [0.0] * len(NAMES)
        segment.communication[phase] += seconds

    def mark_end_of_compute(self, tensors: Any) -> None:
        """Ask autograd to tell when every gradient is computed.

        DistributedDataParallel waits for its buckets in a callback that it queues after its last
        gradient; one that is queued at the start of the backward runs before it. Nothing is
        queued where there are no other ranks.
        """
        self.computed_at = None
        distributed = self.torch.distributed
        if not distributed.is_initialized() or not isinstance(tensors, self.torch.Tensor):
            return
        if not tensors.requires_grad or distributed.get_backend() == "nccl":
            return
        engine: Any = self.torch.autograd.Variable._execution_engine

        def queue(_: Any) -> None:
            engine.queue_callback(self.saw_gradients)

        tensors.register_hook(queue)  # type: ignore[no-untyped-call]

    def saw_gradients(self) -> None:
        """Every gradient is computed; what follows until the end is communication."""
        self.computed_at = self.session.clock.now()

    def saw_backward_end(self) -> None:
        """Note what the backward spent after its last gradient."""
        if self.computed_at is None:
            return
        self.add(phases.BACKWARD, max(0.0, self.session.clock.since - self.computed_at))
        self.computed_at = None
