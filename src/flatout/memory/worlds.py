"""A process group of many ranks that is not there, for models sharded over devices."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from torch import distributed, nn

from flatout.memory.subject import Subject


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


def sharded(subject: Subject, count: int) -> Subject:
    """Return the subject with its model sharded over so many devices, as ZeRO stage 3 does it.

    Every block of a list of blocks is a unit of FSDP2's, and what is left is another.
    """
    build = subject.model

    def build_sharded() -> nn.Module:
        return shard(build().to("cuda"), count)

    return replace(subject, model=build_sharded, world_size=count)


def shard(model: nn.Module, count: int) -> nn.Module:
    """Shard a model in place by `fully_shard`, block by block."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (count,))
    for module in list(model.modules()):
        if isinstance(module, nn.ModuleList):
            for block in module:
                if any(True for _ in block.parameters()):
                    fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model
