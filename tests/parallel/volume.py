"""What ranks send each other in a step: counted in a real run, or traced in one process.

A traced rank is one of a process group that is not there: its collectives return shapes and send
nothing, so one process stands for any rank of a thousand. Tensors have no values and take no
memory.
"""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Of the operators that exchange something: those of process groups, and DTensor's."""
NOT_COUNTED = ("wait", "wrap", "barrier", "monitored_barrier")
FAKE = "fake"
"""torch's backend that exchanges nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """Collectives of one kind over one axis."""

    calls: int
    bytes: int
    """Of the whole tensor of each call, which every rank gets or gives a part of."""


class VolumeCounter(TorchDispatchMode):
    """Counts collectives and their bytes by axis and kind while it is entered."""

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.axes = axes or {}
        """Names of axes by those of their process groups; what is not named is `world`."""
        self.calls: Counter[tuple[str, str]] = Counter()
        self.sizes: Counter[tuple[str, str]] = Counter()

    @property
    def found(self) -> dict[str, Exchanged]:
        """What was exchanged, as `axis kind`."""
        return {
            " ".join(key): Exchanged(calls=self.calls[key], bytes=self.sizes[key])
            for key in sorted(self.calls)
        }

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator and count it where it exchanges something."""
        del types
        result = func(*args, **(kwargs or {}))
        kind = func.__name__.partition(".")[0].strip("_")
        if func.namespace in NAMESPACES and not kind.startswith(NOT_COUNTED):
            given = tree_leaves((args, kwargs))
            tensors = [x for x in (*given, *tree_leaves(result)) if isinstance(x, torch.Tensor)]
            key = self._axis(given), KINDS.get(kind, kind)
            self.calls[key] += 1
            self.sizes[key] += max((x.numel() * x.element_size() for x in tensors), default=0)
        return result

    def _axis(self, given: list[Any]) -> str:
        for one in given:
            if isinstance(one, str) and one in self.axes:
                return self.axes[one]
            if isinstance(one, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):
                    name = dist.ProcessGroup.unbox(one).group_name
                    return self.axes.get(name, "world")
        return "world"


KINDS = {
    "allgather_into_tensor_coalesced": "all_gather",
    "allgather_base": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_out": "all_gather",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "allreduce": "all_reduce",
    "recv_any_source": "recv",
}
"""Names of one collective in the two families of operators."""


def axes_of(mesh: Any) -> dict[str, str]:
    """Return the axes of a device mesh by the names of their process groups."""
    return {mesh[axis].get_group().group_name: axis for axis in mesh.mesh_dim_names}


@contextlib.contextmanager
def absent_ranks(rank: int, ranks: int) -> Iterator[None]:
    """Be this rank of a group that is not there while this runs.

    torch's pipelines vote over the group before the first step, which needs values: that is left
    out, as it sends a few bytes once.
    """
    from torch.distributed.pipelining import schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from flatout.agent.patching import swapped

    dist.init_process_group(FAKE, rank=rank, world_size=ranks, store=FakeStore())
    owner = schedules._PipelineSchedule
    try:
        with contextlib.ExitStack() as stack:
            if hasattr(owner, "_warmup_p2p"):
                stack.enter_context(swapped(owner, "_warmup_p2p", _skip_vote(schedules)))
            yield
    finally:
        dist.destroy_process_group()


def _skip_vote(schedules: Any) -> Callable[..., None]:
    def skip(_schedule: Any, stages: Any, *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    return skip


def reduced_by_hook(model: nn.Module) -> None:
    """Let DDP reduce its buckets by a hook: its own way asks a group that is there for a result."""

    def reduce(_: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        dist.all_reduce(bucket.buffer())
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    reduce.__annotations__.clear()  # torch accepts its own words there, or none
    model.register_comm_hook(None, reduce)  # type: ignore[operator]


def without_values(build: Callable[[], nn.Module]) -> tuple[nn.Module, Any]:
    """Return a spread model whose tensors have no values, and the mode to step it under.

    It is built on the meta device: a device mesh cannot be made under fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with torch.device("meta"):
        model = build()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        model.to_empty(device="cpu")
    return model, mode
