"""A small training that notes when each of its steps began and ended, in a file of the process."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

log = Path(sys.argv[1]) / f"{os.getpid()}.jsonl"
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
began = time.monotonic()
with log.open("a") as file:
    for number in range(100_000):
        loss = model(torch.randn(256, 256)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        ended = time.monotonic()
        optimizer.step()
        file.write(json.dumps({"process": os.getpid(), "began": began, "ended": ended}) + "\n")
        file.flush()
        began = time.monotonic()
        if sys.argv[2:] == ["crash"] and number == 30 and optimizer.defaults.get("fused"):
            raise RuntimeError("crashed as it was asked to")
