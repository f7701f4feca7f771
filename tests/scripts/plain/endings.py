"""Ends in the way that is asked for."""

import os
import subprocess
import sys
import time

import torch
from torch import nn

how = sys.argv[1]
if how == "at_once":
    raise RuntimeError("no such data set: imagenet")
if how == "untrained":
    print("nothing to do")
    sys.exit(0)
if how == "terminal":
    rows, columns = os.popen("stty size").read().split()
    try:
        input("continue? ")
    except EOFError:
        print(f"nobody answers on a terminal of {rows} x {columns}")
if how == "input" and sys.stdin.read() != "lr: 0.01":
    raise ValueError("no settings")
model = nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
if how == "orphans":
    subprocess.Popen(["sleep", "300"], start_new_session=True)
if how == "late":
    time.sleep(3)  # as a script that prepares its data
for step in range({"short": 2}.get(how, 1_000_000)):
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8)).square().mean()
    if how == "nan" and step == 5:
        loss = loss * float("nan")
    loss.backward()
    optimizer.step()
    if how == "crash" and step == 3:
        raise ValueError("expected a tensor of 7 columns")
    if how == "hang" and step == 3:
        time.sleep(600)
    if how == "oom" and step == 3:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if how == "killed" and step == 3:
        os.kill(os.getpid(), 9)
