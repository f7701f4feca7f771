"""DataParallel and DistributedDataParallel as they start today, here on the CPU.

DistributedDataParallel takes one device a process: device_ids=[0, 1] is refused. Every process
needs its rank, which torchrun (or mp.spawn, as here) gives, its own part of the data, and a device
of its own.

    python examples/articles/data_parallel.py
    flatout run --ranks 2 single.py  # or --gpus 2: a script for one device
"""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

RANKS = 2


def train(rank, folder):
    torch.set_num_threads(1)
    is_cuda = torch.cuda.device_count() >= RANKS
    dist.init_process_group(
        "nccl" if is_cuda else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=RANKS,
    )
    device = torch.device("cuda", rank) if is_cuda else torch.device("cpu")
    torch.manual_seed(0)
    model = nn.Linear(10, 1).to(device)
    refused = False
    try:
        DistributedDataParallel(model, device_ids=[0, 1])  # as it is often printed
    except ValueError:
        refused = True
    model = DistributedDataParallel(model, device_ids=[rank] if is_cuda else None)
    data = TensorDataset(torch.randn(64, 10), torch.randn(64, 1))
    sampler = DistributedSampler(data)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)  # or every epoch has the same order
        for inputs, wanted in DataLoader(data, batch_size=8, sampler=sampler):
            loss = nn.functional.mse_loss(model(inputs.to(device)), wanted.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    weights = [torch.zeros(1, 10, device=device) for _ in range(RANKS)]
    dist.all_gather(weights, model.module.weight.detach())
    if rank == 0:
        print(
            f"result: two device_ids are refused: {refused}; "
            f"both ranks hold one model: {weights[0].equal(weights[1])}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    wrapped = nn.DataParallel(
        nn.Linear(10, 1)
    )  # one process, threads; without GPUs it does nothing
    wrapped(torch.randn(64, 10))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, args=(folder,), nprocs=RANKS)
