"""Data-parallel training of two ranks: under torchrun, or with `--spawn` by processes of its own.

One rank can be made slow, or fail.
"""

import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

SLOW_S = 0.02

parser = argparse.ArgumentParser()
parser.add_argument("--spawn", action="store_true")
parser.add_argument("--slow", choices=["nothing", "data", "forward", "backward", "batch"])
parser.add_argument("--by-hand", action="store_true", help="reduce the gradients without DDP")
parser.add_argument("--crash", action="store_true")
parser.add_argument("--ready", action="store_true", help="rank 1 has its samples in a list")


class Rows(Dataset):
    def __init__(self, delay_s):
        self.delay_s = delay_s

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        return torch.full((16,), index / 64), index % 4


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        time.sleep(SLOW_S)
        return gradient


class Net(nn.Module):
    def __init__(self, slow):
        super().__init__()
        self.slow = slow
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x):
        if self.slow == "forward":
            time.sleep(SLOW_S)
        if self.slow == "batch":
            time.sleep(SLOW_S * len(x) / 16)
        x = self.layers(x)
        return Slow.apply(x) if self.slow == "backward" else x


def train(rank, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    slow = args.slow if rank == 1 or args.slow == "batch" else None
    is_larger = rank == 1 and args.slow == "batch"
    rows = Rows(SLOW_S / 4 if slow == "data" else 0.0)
    if args.ready and rank == 1:
        rows = list(map(rows.__getitem__, range(len(rows))))
    loader = DataLoader(rows, batch_size=16 if is_larger else 4)
    model = Net(slow)
    if not args.by_hand:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0
    for _ in range(2_000):
        for number, (x, y) in enumerate(loader):
            if number == 4:
                break  # ranks with batches of different sizes make equally many steps
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            if args.by_hand:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            step += 1
            if args.crash and rank == 1 and step == 20:
                raise ValueError("rank one lost its data")


if __name__ == "__main__":
    args = parser.parse_args()
    if args.spawn:
        with socket.create_server(("127.0.0.1", 0)) as free:  # others may train here too
            port = free.getsockname()[1]
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        torch.multiprocessing.spawn(train, (args,), nprocs=2)
    else:
        train(int(os.environ["RANK"]), args)
