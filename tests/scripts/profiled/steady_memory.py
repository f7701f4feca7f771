"""Conv, linear, checkpoint, views, in-place, Adam. `--truth FILE`: its own profiler instead.

The profiler then runs from the first tensor on, so that its total is that of everything.
"""

import argparse
import contextlib

import torch
import torch.nn as nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.block = nn.Sequential(nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16))
        self.head = nn.Linear(16 * 32 * 32, 10)

    def forward(self, x):
        x = self.conv(x)
        x = checkpoint(self.block, x, use_reentrant=False)
        x = x.add_(1.0)
        wide = x.repeat(1, 8, 1, 1)  # the largest tensor
        x = wide[:, ::2].mul(2)[:, :16] * 1.5
        return self.head(x.flatten(1))


parser = argparse.ArgumentParser()
parser.add_argument("--truth")
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()


def part(name):
    return record_function("part:" + name) if args.truth else contextlib.nullcontext()


def main():
    torch.manual_seed(0)
    net = Net()
    optimizer = torch.optim.Adam(net.parameters())
    x, y = torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))
    for step in range(args.steps):
        with part(f"{step}:other"):
            optimizer.zero_grad()
        with part(f"{step}:forward"):
            out = net(x)
        with part(f"{step}:other"):
            loss = nn.functional.cross_entropy(out, y)
        with part(f"{step}:backward"):
            loss.backward()
        with part(f"{step}:optimizer"):
            optimizer.step()


if args.truth:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        main()
    profiler.export_chrome_trace(args.truth)
else:
    main()
