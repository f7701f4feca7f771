"""A loop that profiles some of its own steps, and fails where its record misses any of them."""

import sys

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

WARMUP, ACTIVE, PER_STEP = 2, 2, 2


def check(profiler):
    calls = sum(event.count for event in profiler.key_averages() if event.key == "aten::addmm")
    assert calls >= ACTIVE * PER_STEP, f"{calls} products in the script's own record"


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
plan = schedule(wait=int(sys.argv[1]), warmup=WARMUP, active=ACTIVE, repeat=1)
with profile(activities=[ProfilerActivity.CPU], schedule=plan, on_trace_ready=check) as profiler:
    for _ in range(60):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).sum().backward()
        optimizer.step()
        profiler.step()
