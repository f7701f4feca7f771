"""One rank of many that are not there: a process group that exchanges nothing.

`pretended_ranks` is for a script, `pretended_world` for a step whose model shards itself.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import distributed as parallel

from flatout.agent.patching import swapped

ALONE = 1


@contextlib.contextmanager
def pretended_ranks(reduces: Callable[[Tensor], None] = lambda _: None) -> Iterator[None]:
    """Let a script make a process group of ranks that are not there while this runs.

    `DistributedDataParallel` works with its own reducer, so that gradient buckets are what torch
    makes of them: in their first order from the beginning on, built again before the second step.

    Args:
        reduces: told of every bucket of gradients that would be sent.
    """
    if not distributed.is_available():
        yield
        return
    join = _joining(distributed.init_process_group)
    with contextlib.ExitStack() as stack:
        for owner in (distributed, distributed.distributed_c10d):
            stack.enter_context(swapped(owner, "init_process_group", join))
        for name in ("is_nccl_available", "is_gloo_available"):
            for owner in (distributed, distributed.distributed_c10d):
                stack.enter_context(swapped(owner, name, lambda: True))
        # Both compare or copy the values of parameters, which are not there.
        for name in ("_verify_param_shape_across_processes", "_sync_module_states"):
            stack.enter_context(swapped(parallel, name, lambda *_, **__: True))
        kind = parallel.DistributedDataParallel
        stack.enter_context(swapped(kind, "__init__", _making(kind.__init__, reduces)))
        yield


def _joining(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return `init_process_group` for a group of which this process is the first rank."""

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        size = int(os.environ.get("WORLD_SIZE", kwargs.get("world_size", ALONE)))
        original("fake", rank=0, world_size=max(size, ALONE), store=FakeStore())

    return init_process_group


class _Silent:
    """Stands for DDP's logger, whose timer a build without CUDA does not hold."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        """The reducer refers to it."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_, **__: None


def _making(
    original: Callable[..., None], reduces: Callable[[Tensor], None]
) -> Callable[..., None]:
    """Return DDP's `__init__` with a hook that returns each bucket as it is."""

    def unchanged(_: Any, bucket: Any) -> Any:
        reduces(bucket.buffer())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    unchanged.__annotations__.clear()  # torch accepts its own words there, or none

    def __init__(model: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(model, *args, **kwargs)
        model.logger = _Silent(model.logger)
        model.register_comm_hook(None, unchanged)

    return __init__


@contextlib.contextmanager
def pretended_world(size: int) -> Iterator[None]:
    """Be rank 0 of so many while this runs: collectives return shapes and exchange nothing."""
    if size == 1 or distributed.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    distributed.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()
