"""A training whose activations do not fit into the memory it may have.

python hungry.py [--room MIB] [--fails-at STEP] [--resume FILE] [--steps N]
"""

import argparse
import ctypes
import resource
from pathlib import Path

import torch
from torch import nn

MIB = 2**20
MMAP_THRESHOLD = -3  # M_MMAP_THRESHOLD in glibc's malloc.h
ROWS, WIDTH, DEPTH = 16_384, 64, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(torch.sigmoid(self.up(x))))


def limit(room_mib):
    """Let this process grow by so much and no more, as a device would.

    What it may write to is counted and not its addresses: a thread that starts later reserves
    64 MiB of those for its heap and uses none of it. Each tensor has pages of its own, which go
    back when it is freed: holes in a heap grow from step to step.
    """
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 2**16)
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    size = pages * resource.getpagesize() + room_mib * MIB
    resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--room", type=int, default=0)
    parser.add_argument("--fails-at", type=int, default=0)
    parser.add_argument("--resume", default="")
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(DEPTH)), nn.Linear(WIDTH, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    start = 0
    if args.resume:
        saved = torch.load(args.resume)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    print(f"begin at step {start}", flush=True)
    x = torch.randn(ROWS, WIDTH)
    if args.room:
        limit(args.room)
    for step in range(start, args.steps):
        loss = model(x if args.room else x[:64]).square().mean()
        is_whole = not any("forward" in vars(module) for module in model)
        if args.fails_at and step + 1 == args.fails_at and is_whole:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        torch.save({"model": model.state_dict(), "step": step + 1}, "last.pt")
    print(f"done after step {args.steps}", flush=True)


if __name__ == "__main__":
    main()
