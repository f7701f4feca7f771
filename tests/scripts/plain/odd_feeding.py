"""Batches that come to the loop in odd ways, six samples each; evaluated on a loader now and then.

`cycle`: kept after the first epoch; `list`: all drawn before; `own`: made by the loop; `thread`:
drawn ahead in a thread.
"""

import itertools
import queue
import sys
import threading

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

kind = sys.argv[1]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
train = DataLoader(TensorDataset(torch.randn(96, 8)), batch_size=6)
held_out = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=16)


def drawn_ahead():
    ready = queue.Queue(maxsize=4)

    def draw():
        while True:
            for batch in train:
                ready.put(batch)

    threading.Thread(target=draw, daemon=True).start()
    while True:
        yield ready.get()


def batches():
    if kind == "list":
        return itertools.cycle(list(train))
    if kind == "own":
        return ((torch.randn(6, 8),) for _ in itertools.count())
    return drawn_ahead() if kind == "thread" else itertools.cycle(train)


print(next(iter(held_out))[0].shape)
for step, (x,) in enumerate(batches()):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    if step % 20 == 19:
        model.eval()
        with torch.no_grad():
            for (y,) in held_out:
                model(y)
        model.train()
