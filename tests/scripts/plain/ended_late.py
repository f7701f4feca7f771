"""Trains until its trial has noted something, and is then ended by the signal that is named."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
notes = Path(os.environ["FLATOUT_SPEC"]).parent
end = time.monotonic() + 60
while time.monotonic() < end and not list(notes.glob("partial-*.json")):
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01)
if sys.argv[1] == "raise":
    raise ValueError("the validation set is empty")
os.kill(os.getpid(), signal.Signals[sys.argv[1]])
