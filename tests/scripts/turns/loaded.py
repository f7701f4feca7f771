"""A small training that notes when its samples are made and its steps begin, by process."""

import json
import os
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


def note(kind):
    row = {"process": os.getpid(), "kind": kind, "began": time.monotonic()}
    with (Path(sys.argv[1]) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(row | {"ended": row["began"]}) + "\n")


class Samples(Dataset):
    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        note("sample")
        return torch.randn(256)


model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
optimizer = torch.optim.AdamW(model.parameters())
for batch in DataLoader(Samples(), batch_size=32):
    note("step")
    loss = model(batch).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
