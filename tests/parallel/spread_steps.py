"""One step of a small model under each strategy on four ranks, with what they exchange counted.

torchrun ... spread_steps.py OUT.json
"""

import contextlib
import json
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WIDTH, BLOCKS, ROWS, MICROBATCHES = 32, 4, 8, 4
NAMESPACES = ("c10d", "_c10d_functional", "c10d_functional")
"""Of the operators that exchange something: those of process groups, and DTensor's."""
NOT_COUNTED = ("wait", "wrap", "barrier", "monitored_barrier")
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


class VolumeCounter(TorchDispatchMode):
    """Counts collectives and their bytes by axis and kind while it is entered."""

    def __init__(self, mesh):
        super().__init__()
        self.axes = {mesh[axis].get_group().group_name: axis for axis in mesh.mesh_dim_names}
        """By the names of their process groups; what is not named is `world`."""
        self.calls, self.sizes = Counter(), Counter()

    @property
    def found(self):
        """What was exchanged, as `axis kind`; bytes are those of each call's whole tensor."""
        return {
            " ".join(key): {"calls": self.calls[key], "bytes": self.sizes[key]}
            for key in sorted(self.calls)
        }

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run the operator and count it where it exchanges something."""
        result = func(*args, **(kwargs or {}))
        kind = func.__name__.partition(".")[0].strip("_")
        if func.namespace in NAMESPACES and not kind.startswith(NOT_COUNTED):
            given = tree_leaves((args, kwargs))
            tensors = [x for x in (*given, *tree_leaves(result)) if isinstance(x, torch.Tensor)]
            key = self._axis(given), KINDS.get(kind, kind)
            self.calls[key] += 1
            self.sizes[key] += max((x.numel() * x.element_size() for x in tensors), default=0)
        return result

    def _axis(self, given):
        for one in given:
            if isinstance(one, str) and one in self.axes:
                return self.axes[one]
            if isinstance(one, torch.ScriptObject):
                with contextlib.suppress(RuntimeError, TypeError):
                    name = dist.ProcessGroup.unbox(one).group_name
                    return self.axes.get(name, "world")
        return "world"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(blocks=BLOCKS):
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def sharded(built, mesh, *, reshards):
    for block in built:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(built, mesh=mesh, reshard_after_forward=reshards)


def tensor_parallel(built, mesh, *, splits_sequence):
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if splits_sequence:
        plan = {
            "norm": SequenceParallel(sequence_dim=0, use_local_output=False),
            "up": ColwiseParallel(input_layouts=Shard(0)),
            "down": RowwiseParallel(output_layouts=Shard(0)),
        }
    for block in built:
        parallelize_module(block, mesh, plan)
    return built


STRATEGIES = {
    "ddp": ((4,), ("dp",), lambda _: DistributedDataParallel(model())),
    "zero2": ((4,), ("dp",), lambda m: sharded(model(), m, reshards=False)),
    "zero3": ((4,), ("dp",), lambda m: sharded(model(), m, reshards=True)),
    "hybrid": ((2, 2), ("replicate", "shard"), lambda m: sharded(model(), m, reshards=True)),
    "tp": ((4,), ("tp",), lambda m: tensor_parallel(model(), m, splits_sequence=False)),
    "sequence": ((4,), ("tp",), lambda m: tensor_parallel(model(), m, splits_sequence=True)),
    "zero3 and tp": (
        (2, 2),
        ("dp", "tp"),
        lambda m: sharded(
            tensor_parallel(model(), m["tp"], splits_sequence=False), m["dp"], reshards=True
        ),
    ),
}
PIPELINES = {
    "gpipe": ((4,), ("pp",), ScheduleGPipe, None),
    "1f1b": ((4,), ("pp",), Schedule1F1B, None),
    "1f1b and zero2": ((2, 2), ("pp", "dp"), Schedule1F1B, False),
    "1f1b and zero3": ((2, 2), ("pp", "dp"), Schedule1F1B, True),
}


def counted(name):
    """Return what this rank exchanges in one step under a strategy."""
    if name in PIPELINES:
        return counted_in_pipeline(*PIPELINES[name])
    sizes, axes, build = STRATEGIES[name]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    built, counter = build(mesh), VolumeCounter(mesh)
    optimizer = torch.optim.AdamW(built.parameters(), foreach=False)
    with counter:
        out = built(torch.ones(ROWS, WIDTH))
        out = out.to_local() if hasattr(out, "to_local") else out
        out.square().mean().backward()
        optimizer.step()
    return counter.found


def counted_in_pipeline(sizes, axes, schedule, reshards):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    stages, number = mesh["pp"].size(), mesh["pp"].get_local_rank()
    part = model(BLOCKS // stages)
    if reshards is not None:
        part = sharded(part, mesh["dp"], reshards=reshards)
    shape = torch.zeros(ROWS // MICROBATCHES, WIDTH, requires_grad=True)
    stage = PipelineStage(
        part,
        number,
        stages,
        torch.device("cpu"),
        input_args=(shape.detach(),) if number == 0 else (shape,),
        output_args=shape,
        group=mesh["pp"].get_group(),
    )
    steps = schedule(stage, MICROBATCHES, loss_fn=lambda out, _: out.square().mean())
    run(steps, number, stages)  # the first step votes, and makes the pairs' groups
    with VolumeCounter(mesh) as counter:
        run(steps, number, stages)
    return counter.found


def run(steps, number, stages):
    rows = (torch.ones(ROWS, WIDTH),) if number == 0 else ()
    target = {"target": torch.zeros(ROWS, WIDTH)} if number == stages - 1 else {}
    steps.step(*rows, **target)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    found = {name: counted(name) for name in (*STRATEGIES, *PIPELINES)}
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found, indent=1), encoding="utf-8")
    dist.destroy_process_group()
