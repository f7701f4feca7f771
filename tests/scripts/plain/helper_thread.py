"""Trains once children have ended that outlive the thread which started them.

With `kill` it ends its supervisor instead, having written a file; the children go on.
"""

import multiprocessing
import os
import sys
import threading
import time
from pathlib import Path

import torch
from torch import nn


def last(is_ready, lasts_s):
    is_ready.set()
    time.sleep(lasts_s)


def start(children, lasts_s):
    for method in ("fork", "spawn"):
        context = multiprocessing.get_context(method)
        is_ready = context.Event()
        child = context.Process(target=last, args=(is_ready, lasts_s))
        child.start()
        is_ready.wait()
        children.append(child)


if __name__ == "__main__":
    kills = "kill" in sys.argv
    children = []
    thread = threading.Thread(target=start, args=(children, 300.0 if kills else 0.5))
    thread.start()
    thread.join()
    if kills:
        Path("written.txt").write_text("by a trial")
        os.kill(os.getppid(), 9)
        time.sleep(300)
    for child in children:
        child.join()
    codes = [child.exitcode for child in children]
    if any(codes):
        raise RuntimeError(f"the children of a helper thread ended with {codes}")
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5 if "short" in sys.argv else 1_000_000):
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
    print("trained")
