import torch
from torch import nn
from torch.utils.data import TensorDataset

from flatout import Task
from flatout.planner.tracing.training_step import TrainingStep


def data():
    lengths = TensorDataset(torch.randn(40, 3, 8, 8), torch.randint(0, 10, (40,)))
    open("data.txt", "w").close()
    return lengths


task = Task(
    model=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 256), nn.ReLU(), nn.Linear(256, 10)),
    data=data,
    loss=lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()),
    batch_size=20,
)


def made():
    return task


def broken_loss(model, batch):
    raise ZeroDivisionError("nothing to divide by")


subject = TrainingStep(
    model=task.model,
    batch=lambda n, device: (torch.zeros(n, 3, 8, 8, device=device), None),
    loss=lambda model, batch: model(batch[0]).sum(),
    optimizer=task.optimizer,
    batch_size=3,
)
broken = TrainingStep(
    model=task.model, batch=subject.batch, loss=broken_loss, optimizer=task.optimizer
)


def few(count, device):
    if count > 3:
        raise ValueError(f"there is no room for {count}")
    return subject.batch(count, device)


full = TrainingStep(
    model=task.model, batch=few, loss=subject.loss, optimizer=task.optimizer, batch_size=3
)
deadly = TrainingStep(
    model=lambda: __import__("os").abort(),
    batch=subject.batch,
    loss=subject.loss,
    optimizer=task.optimizer,
)
number = 7
