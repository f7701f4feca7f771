"""One step of a small model under each strategy, in real ranks (gloo) or as one traced rank.

torchrun ... spread_steps.py real OUT.json     all strategies, by the ranks that there are
python spread_steps.py traced OUT.json RANK RANKS
python spread_steps.py thousand OUT.json       rank 517 of 1,024, of a model of 2.1e9 parameters
"""

import contextlib
import json
import resource
import sys
from dataclasses import asdict
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

from tests.parallel.volume import (
    VolumeCounter,
    absent_ranks,
    axes_of,
    reduced_by_hook,
    without_values,
)

WIDTH, BLOCKS, ROWS, MICROBATCHES = 32, 4, 8, 4
IS_TRACED = sys.argv[1:2] == ["traced"]
if sys.argv[1:2] == ["thousand"]:
    WIDTH, BLOCKS = 8192, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def model(blocks=BLOCKS):
    return nn.Sequential(*(Block() for _ in range(blocks)))


def sharded(built, mesh, *, reshards):
    for block in built:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(built, mesh=mesh, reshard_after_forward=reshards)


def ddp(_mesh):
    built = model()
    if not IS_TRACED:
        return DistributedDataParallel(built)
    built = DistributedDataParallel(built, init_sync=False)
    reduced_by_hook(built)
    return built


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
    "ddp": ((4,), ("dp",), ddp),
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


def prepared(build):
    if IS_TRACED:
        return without_values(build)
    torch.manual_seed(0)
    return build(), contextlib.nullcontext()


def counted(name):
    """Return what this rank exchanges in one step under a strategy."""
    if name in PIPELINES:
        return counted_in_pipeline(*PIPELINES[name])
    sizes, axes, build = STRATEGIES[name]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    if name == "ddp" and IS_TRACED:
        # Its reducer needs parameters with memory: they are real, and nothing is exchanged.
        built, mode = build(mesh), contextlib.nullcontext()
    else:
        built, mode = prepared(lambda: build(mesh))
    counter = VolumeCounter(axes_of(mesh))
    with mode:
        optimizer = torch.optim.AdamW(built.parameters(), foreach=False)
        rows = torch.ones(ROWS, WIDTH)
        with counter:
            out = built(rows)
            out = out.to_local() if hasattr(out, "to_local") else out
            out.square().mean().backward()
            optimizer.step()
    return {key: asdict(value) for key, value in counter.found.items()}


def counted_in_pipeline(sizes, axes, schedule, reshards):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    stages, number = mesh["pp"].size(), mesh["pp"].get_local_rank()

    def build():
        part = model(BLOCKS // stages)
        return part if reshards is None else sharded(part, mesh["dp"], reshards=reshards)

    built, mode = prepared(build)
    counter = VolumeCounter(axes_of(mesh))
    with mode:
        shape = torch.zeros(ROWS // MICROBATCHES, WIDTH, requires_grad=True)
        stage = PipelineStage(
            built,
            number,
            stages,
            torch.device("cpu"),
            input_args=(shape.detach(),) if number == 0 else (shape,),
            output_args=shape,
            group=mesh["pp"].get_group(),
        )
        steps = schedule(stage, MICROBATCHES, loss_fn=lambda out, _: out.square().mean())
        if not IS_TRACED:
            run(steps, number, stages)  # the first step votes, and makes the pairs' groups
        with counter:
            run(steps, number, stages)
    return {key: asdict(value) for key, value in counter.found.items()}


def run(steps, number, stages):
    rows = (torch.ones(ROWS, WIDTH),) if number == 0 else ()
    target = {"target": torch.zeros(ROWS, WIDTH)} if number == stages - 1 else {}
    steps.step(*rows, **target)


def thousand():
    """Return what one rank of 1,024 exchanges, sharded over 128 and split over 8.

    With it the MiB by which that raised the peak of what the process has in memory.
    """
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with absent_ranks(517, 1024):
        mesh = init_device_mesh("cpu", (128, 8), mesh_dim_names=("dp", "tp"))

        def build():
            built = tensor_parallel(model(), mesh["tp"], splits_sequence=False)
            return sharded(built, mesh["dp"], reshards=True)

        built, mode = without_values(build)
        counter = VolumeCounter(axes_of(mesh))
        with mode, counter:
            built(torch.ones(ROWS, WIDTH)).square().mean().backward()
    found = {key: asdict(value) for key, value in counter.found.items()}
    return {**found, "mib": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024}


def main(kind, path, *place):
    if kind == "thousand":
        found = thousand()
    elif kind == "traced":
        found = {}
        for name in (*STRATEGIES, *PIPELINES):
            with absent_ranks(int(place[0]), int(place[1])):
                found[name] = counted(name)
    else:
        dist.init_process_group("gloo")
        found = {name: counted(name) for name in (*STRATEGIES, *PIPELINES)}
        path = f"{path}.{dist.get_rank()}"
        dist.destroy_process_group()
    Path(path).write_text(json.dumps(found, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
