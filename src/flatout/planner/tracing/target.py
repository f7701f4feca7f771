"""From what a user names to a Subject: a Task, a Subject, a function that returns one."""

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data import Dataset, IterableDataset, default_collate

from flatout.agent import task_loop as loop
from flatout.agent.nested import map_leaves
from flatout.agent.samples import leading_size
from flatout.agent.task import Task
from flatout.agent.task_runner import load_module
from flatout.planner.tracing.script_data import largest
from flatout.planner.tracing.training_step import TrainingStep
from flatout.records.errors import UserError, unknown


def load_subject(target: str) -> TrainingStep:
    """Return the subject that `file.py:name` names: a Task, a Subject, or a function giving one."""
    path, _, name = target.rpartition(":")
    module = load_module(Path(path))
    found = getattr(module, name, None)
    if callable(found) and not isinstance(found, Task | TrainingStep | type):
        found = found()
    if isinstance(found, Task):
        return subject_of(found)
    if isinstance(found, TrainingStep):
        return replace(found, name=name) if found.name == "subject" else found
    if not hasattr(module, name):
        kinds = {k for k, v in vars(module).items() if isinstance(v, Task | TrainingStep)}
        raise UserError(f"{path}: {unknown('Task or Subject', name, kinds)}")
    raise UserError(
        f"{path}: {name} is a {type(found).__name__}; give a flatout.Task, a Subject, or a "
        "function without arguments that returns one"
    )


def subject_of(task: Task) -> TrainingStep:
    """Return a Task as the tracer takes it; its data is read for real, outside the trace, once."""
    data: Any = task.data()
    is_indexed = isinstance(data, Dataset) and not isinstance(data, IterableDataset)

    @functools.cache
    def first() -> Any:
        for batch in loop.batches_of(replace(task, data=lambda: data)):
            return batch
        raise UserError(f"Task {task.name!r}: data() holds no batch; there is nothing to trace")

    @functools.cache
    def drawn(count: int) -> Any:
        """Return a real batch; of samples the largest among the first, so many times."""
        with _disable_current_modes():
            if not is_indexed:
                return resized(first(), count)
            index, _, _ = largest(data)
            if index is None:
                raise UserError("the data set is empty: there is no batch to trace")
            return (task.collate or default_collate)([data[index]] * count)

    def batch(count: int, device: torch.device) -> Any:
        return map_leaves(drawn(count), lambda leaf: _without_values(leaf, device))

    own = 0 if is_indexed else leading_size(first())
    return TrainingStep(
        model=task.model,
        batch=batch,
        loss=task.loss,
        optimizer=task.optimizer,
        batch_size=own or task.batch_size,
        name=task.name,
    )


def resized(batch: Any, count: int) -> Any:
    """Return a batch with another number of samples in every tensor that has them first."""
    size = leading_size(batch)
    if size in (0, count):
        return batch

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != size:
            return leaf
        return leaf.new_zeros((count, *leaf.shape[1:]))

    return map_leaves(batch, resize)


def _without_values(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
    return leaf.to(device) if hasattr(leaf, "to") else leaf
