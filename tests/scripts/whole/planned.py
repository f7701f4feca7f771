"""Subjects and Tasks that are planned in the tests."""

import torch
from torch import nn

from flatout import Task
from flatout.planner.tracing.training_step import TrainingStep

WIDTH = 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(5_000, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(WIDTH, 5_000)

    def forward(self, numbers):
        x = self.tokens(numbers)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch(count, device):
    numbers = torch.zeros(count, 128, dtype=torch.long, device=device)
    return numbers, numbers


def loss(model, pair):
    logits = model(pair[0])
    return nn.functional.cross_entropy(logits.flatten(0, 1), pair[1].flatten())


def adam(model):
    return torch.optim.AdamW(model.parameters())


subject = TrainingStep(model=Model, batch=batch, loss=loss, optimizer=adam, batch_size=16)
task = Task(
    model=Model,
    data=lambda: torch.utils.data.TensorDataset(*batch(64, "cpu")),
    loss=loss,
    optimizer=adam,
    batch_size=16,
)


def fails(model, pair):
    raise ValueError(f"no loss for {len(pair)} parts\nand a second line")


failing = TrainingStep(model=Model, batch=batch, loss=fails, optimizer=adam)


def loss_of_one(model, pair):
    """Takes a copy where there is one sample only."""
    logits = model(pair[0])
    if len(pair[0]) == 1:
        logits = logits.clone()
    return nn.functional.cross_entropy(logits.flatten(0, 1), pair[1].flatten())


alone = TrainingStep(model=Model, batch=batch, loss=loss_of_one, optimizer=adam, batch_size=1)
