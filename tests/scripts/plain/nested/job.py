"""Parses sys.argv, imports a sibling, reads a file relative to the working directory."""

import sys
from pathlib import Path

import torch
from sibling import make_model

words = sys.argv[1:]
assert words == ["--name", "resource_tracker", "--budget", "3"], words
width = int(Path("settings/width.txt").read_text())
model = make_model(width)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for _ in range(5_000):
    optimizer.zero_grad()
    loss = model(torch.randn(4, width)).square().mean()
    loss.backward()
    optimizer.step()
