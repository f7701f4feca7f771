"""Train a sharded wide last layer in a group of one process, with and without the lever.

FSDP gives gathered weights back after the layer's call, in a group of one process as well.
"""

import json
import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
)

from flatout.techniques.memory import chunked_cross_entropy as lever

CLASSES, WIDTH, ROWS, STEPS = 4096, 16, 64, 3
HALF = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def by_first(net):
    policy = MixedPrecision(**HALF)
    cpu = torch.device("cpu")
    return FullyShardedDataParallel(
        net, mixed_precision=policy, use_orig_params=True, device_id=cpu
    )


def by_second(net, **policy):
    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(**policy)
    fully_shard(net[1], mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    return fully_shard(net, mesh=mesh, mp_policy=policy)


WAYS = (by_first, by_second, lambda net: by_second(net, **HALF))


def losses(way):
    torch.manual_seed(0)
    net = way(nn.Sequential(nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    tokens, target = torch.randint(CLASSES, (2, ROWS))
    found = []
    for _ in range(STEPS):
        loss = F.cross_entropy(net(tokens), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


with tempfile.TemporaryDirectory() as folder:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/at", rank=0, world_size=1)
    theirs = [losses(way) for way in WAYS]
    undo = lever.install(1)
    ours = [losses(way) for way in WAYS]
    undo()
    sys.stdout.write(json.dumps({"theirs": theirs, "ours": ours, "sliced": len(lever.SLICED)}))
    distributed.destroy_process_group()
