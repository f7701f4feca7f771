"""A process group of many ranks that is not there, for models sharded over devices."""

import contextlib
from collections.abc import Iterator

import torch
from torch import distributed


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


def mesh_of(size: int) -> "torch.distributed.device_mesh.DeviceMesh":
    """Return a mesh of so many traced devices, as `fully_shard` takes it."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cuda", (size,))
