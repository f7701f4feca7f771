"""The training loop of a Task: short and plain, with the hook points of every script."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils.data import DataLoader, Dataset, IterableDataset

from flatout.agent.nested import map_leaves
from flatout.agent.task import Task
from flatout.records.errors import UserError


def batch_size(arguments: Any) -> int:
    """Return the first size of the first tensor, 0 where there is none."""
    leaves = _pytree.tree_leaves(arguments)
    sized = (leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim())
    return next((int(leaf.shape[0]) for leaf in sized), 0)


def samples_at(arguments: Any, size: int, rows: Sequence[int]) -> Any:
    """Return the arguments of a batch of that size for some of its samples only."""
    leaves, structure = _pytree.tree_flatten(arguments)

    def picked(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size:
            return leaf[torch.tensor(rows, device=leaf.device)]
        return leaf

    return _pytree.tree_unflatten([picked(leaf) for leaf in leaves], structure)


def split(arguments: Any, size: int, chunks: int) -> list[Any]:
    """Return the arguments of each part, in order."""
    leaves, structure = _pytree.tree_flatten(arguments)
    count = min(chunks, size)

    def parts_of(leaf: Any) -> Sequence[Any]:
        if isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == size:
            return torch.tensor_split(leaf, count)
        return [leaf] * count

    columns = zip(*(parts_of(leaf) for leaf in leaves), strict=True)
    return [_pytree.tree_unflatten(list(column), structure) for column in columns]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStep:
    """One finished step of a training."""

    number: int
    """Counted from 1, over all epochs."""
    epoch: int
    """Counted from 0."""
    loss: Tensor
    """Detached, still on the device: reading it waits for the device."""
    model: nn.Module


def train(task: Task, steps: int | None = None) -> nn.Module:
    """Train a task to its end and return the model.

    Args:
        task: what to train.
        steps: train this many instead of what the task asks for.

    Raises:
        UserError: if one of the task's functions returns something else than it has to.
    """
    return deque(training_steps(task, steps), maxlen=1).pop().model


def training_steps(task: Task, steps: int | None = None) -> Iterator[TaskStep]:
    """Train a task, handing out each step when it is done. The arguments are those of `train`."""
    seed(task.seed)
    device = device_of(task)
    model = checked(task, "model", task.model(), nn.Module).to(device)
    batches = batches_of(task)
    optimizer = checked(task, "optimizer", task.optimizer(model), Optimizer)
    schedule = task.schedule(optimizer) if task.schedule else None
    model.train()
    for number, (epoch, batch) in enumerate(_stream(task, batches, steps or task.steps), start=1):
        optimizer.zero_grad()
        loss = _gradients(task, model, moved(batch, device))
        optimizer.step()
        if schedule is not None:
            schedule.step()
        yield TaskStep(number=number, epoch=epoch, loss=loss, model=model)


def _gradients(task: Task, model: nn.Module, batch: Any) -> Tensor:
    """Run forward and backward of a batch, in parts where the task asks for it; return its loss.

    A part's loss is a mean, so it counts by its share of the whole: parts of other sizes, or with
    more padding, would weigh too much otherwise.
    """
    if task.accum_steps == 1:
        loss = checked_loss(task, task.loss(model, batch))
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return loss.detach()
    total: Any = 0.0
    for part, share in _parts(task, batch):
        loss = checked_loss(task, task.loss(model, part)) * share
        loss.backward()
        total = total + loss.detach()
    found: Tensor = total
    return found


def _parts(task: Task, batch: Any) -> list[tuple[Any, Any]]:
    size = batch_size(batch)
    if size == 0:
        raise UserError(
            f"Task {task.name!r}: accum_steps={task.accum_steps} splits batches along their "
            "samples, and there is no tensor with samples in this one; leave it at 1"
        )
    parts = split(batch, size, task.accum_steps)
    weights = [task.weight(part) if task.weight else batch_size(part) for part in parts]
    whole = sum(weights)
    return [(part, weight / whole) for part, weight in zip(parts, weights, strict=True)]


def seed(value: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(value)
    np.random.seed(value)
    torch.manual_seed(value)


def device_of(task: Task) -> torch.device:
    """Return where a task trains."""
    if task.device is not None:
        return torch.device(task.device)
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def batches_of(task: Task) -> Iterable[Any]:
    """Return what the loop iterates once per epoch."""
    data = task.data()
    if isinstance(data, Dataset):
        return DataLoader(
            data,
            batch_size=task.batch_size,
            shuffle=not isinstance(data, IterableDataset),
            collate_fn=task.collate,
        )
    if not isinstance(data, Iterable):
        raise UserError(
            f"Task {task.name!r}: data() returned a {type(data).__name__}; "
            "return a torch Dataset, a DataLoader, or an iterable of batches"
        )
    return data


def moved(batch: Any, device: torch.device) -> Any:
    """Return the batch with all its tensors on the device, its structure kept."""

    def move(leaf: Any) -> Any:
        # Not only tensors: packed sequences and the batches of other libraries move themselves.
        return leaf.to(device) if hasattr(leaf, "to") else leaf

    return map_leaves(batch, move)


def _stream(task: Task, batches: Iterable[Any], steps: int | None) -> Iterator[tuple[int, Any]]:
    """Return batch after batch with its epoch, until the steps or the epochs are done."""
    count, epoch = 0, 0
    while steps is not None or epoch < task.epochs:
        before = count
        for batch in batches:
            yield epoch, batch
            count += 1
            if count == steps:
                return
        if count == before:
            raise UserError(
                f"Task {task.name!r}: epoch {epoch} had no batch; data() must return something "
                "that holds a batch and can be iterated again: a Dataset, a DataLoader, a list"
            )
        epoch += 1


def checked(task: Task, field: str, value: Any, kind: type) -> Any:
    """Return what a function of a Task gave, refused where it is of another type."""
    if isinstance(value, kind):
        return value
    raise UserError(
        f"Task {task.name!r}: {field}() returned a {type(value).__name__}; "
        f"it has to return a torch {kind.__name__}"
    )


def checked_loss(task: Task, loss: Any) -> Tensor:
    """Return a Task's loss, refused where it is not one number."""
    if not isinstance(loss, Tensor):
        raise UserError(
            f"Task {task.name!r}: loss() returned a {type(loss).__name__}; "
            "it has to return one tensor with one number"
        )
    if loss.numel() != 1:
        raise UserError(
            f"Task {task.name!r}: loss() returned a tensor of shape {tuple(loss.shape)}; "
            "it has to be one number: take its mean"
        )
    return loss
