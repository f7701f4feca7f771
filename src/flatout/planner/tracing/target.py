"""From what a user names to a Subject: a Task, a Subject, a function that returns one."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
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
    """Return a Task as the tracer takes it; its data is read for real, once."""
    drawn = _Drawn(task, task.data())
    return TrainingStep(
        model=task.model,
        batch=drawn.batch,
        loss=task.loss,
        optimizer=task.optimizer,
        batch_size=drawn.own_size(),
        name=task.name,
    )


@dataclass(slots=True)
class _Drawn:
    """Batches of a task, drawn outside the trace and kept by their size."""

    task: Task
    data: Any
    kept: dict[int, Any] = field(default_factory=dict)

    def own_size(self) -> int:
        """Return the samples of a batch; of data that brings its own batches those of the first."""
        if is_indexed(self.data):
            return self.task.batch_size
        return leading_size(self.first()) or self.task.batch_size

    def first(self) -> Any:
        """Return the first batch of data that brings its own."""
        for batch in loop.batches_of(replace(self.task, data=lambda: self.data)):
            return batch
        raise UserError(
            f"Task {self.task.name!r}: data() holds no batch; there is nothing to trace"
        )

    def batch(self, count: int, device: torch.device) -> Any:
        """Return a batch of that many samples, on the device and without its values."""
        if count not in self.kept:
            with real_tensors():
                self.kept[count] = self.real(count)
        return map_leaves(self.kept[count], lambda leaf: _without_values(leaf, device))

    def real(self, count: int) -> Any:
        """Return a real batch; of a data set its largest sample, so many times."""
        if not is_indexed(self.data):
            return resized(self.first(), count)
        collate = self.task.collate or default_collate
        return collate([largest_sample(self.data)] * count)


def is_indexed(data: Any) -> bool:
    """Return whether samples can be taken one by one."""
    return isinstance(data, Dataset) and not isinstance(data, IterableDataset)


def real_tensors() -> Any:
    """Return a context in which a trace does not see what is computed."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def largest_sample(data: Any) -> Any:
    """Return the sample with the most bytes among the first ones: a plan is for the worst batch."""
    index, _, _ = largest(data)
    if index is None:
        raise UserError("the data set is empty: there is no batch to trace")
    return data[index]


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
