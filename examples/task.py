"""A Task: guess the next byte of Python's standard library. Run it with

flatout measure examples/task.py:guess
flatout tune examples/task.py:guess
"""

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import flatout

CONTEXT = 32  # bytes that the model sees


def data():
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("[a-d]*.py")))
    windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, 1)
    return TensorDataset(windows[:, :-1], windows[:, -1])  # flatout shuffles and makes batches


def model():
    return nn.Sequential(
        nn.Embedding(256, 16),
        nn.Flatten(),
        nn.Linear(16 * CONTEXT, 512),
        nn.ReLU(),
        nn.Linear(512, 256),
    )


def loss(model, batch):
    context, following = batch  # on the device already
    return functional.cross_entropy(model(context.long()), following.long())


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def finish(model):
    torch.save(model.state_dict(), "guess.pt")  # after `flatout run`; a trial leaves nothing


guess = flatout.Task(
    name="guess",
    model=model,
    data=data,
    loss=loss,
    optimizer=optimizer,
    batch_size=64,
    steps=2_000,
    finish=finish,
)
