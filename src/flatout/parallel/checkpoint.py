"""Checkpoints of a training on several ranks, which go on with any number of them.

Tensors are stored by torch's distributed checkpoint, under the names of the whole model, each rank
its part; all else is JSON. A checkpoint is written under a temporary name, brought to the disk and
then renamed: one with a final name is whole, whenever a rank was killed.
"""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from flatout.parallel import group
from flatout.records.errors import UserError
from flatout.records.json_records import to_plain

if TYPE_CHECKING:
    from flatout.parallel.task_batches import PartOfBatch
    from flatout.parallel.task_training import TaskTraining

STATE = "training.json"
KEPT = 2
"""Checkpoints that stay: the newest may be the one whose disk block fails."""
NAME = "step-{:09d}"


def newest(folder: Path) -> Path | None:
    """Return the newest whole checkpoint in a folder."""
    found = sorted(path for path in folder.glob("step-*") if (path / STATE).is_file())
    return found[-1] if found else None


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, training: "TaskTraining", folder: str) -> None:
        self.training = training
        self.folder = Path(folder)
        self.last_written = -1

    def after_step(self, part: "PartOfBatch") -> None:
        """Write one where the table asks for it after this step."""
        training = self.training
        every = training.spec.checkpoint_every
        ends_epoch = training.batches.is_last_of_epoch(part)
        if training.steps % every == 0 if every else ends_epoch:
            self.save()

    def save(self) -> None:
        """Write a checkpoint; every rank takes part. Again after the same step does nothing."""
        steps = self.training.steps
        if steps == self.last_written:
            return
        final = self.folder / NAME.format(steps)
        written = self.folder / f".writing-{steps}"
        is_first = dist.get_rank() == 0
        if is_first:
            self.folder.mkdir(parents=True, exist_ok=True)
            for leftover in self.folder.glob(".writing-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            written.mkdir()
        dist.barrier()
        save(self._tensors(), storage_writer=FileSystemWriter(written, sync_files=True))
        rows = self._gathered_numbers()
        if is_first:
            _write_json(written / STATE, self._state() | {"numbers": rows})
            _sync_folder(written)
            shutil.rmtree(final, ignore_errors=True)
            written.rename(final)
            _sync_folder(self.folder)
            for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        dist.barrier()
        self.last_written = steps

    def load_latest(self) -> None:
        """Go on from the newest checkpoint; without one from the beginning.

        Raises:
            UserError: where it is of another model or another training.
        """
        found: list[Any] = [newest(self.folder) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(found, 0)
        if found[0] is None:
            return
        source: Path = found[0]
        try:
            state = json.loads((source / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read the checkpoint {source}: {error}") from None
        training = self.training
        if state["task"] != self._facts():
            raise UserError(
                f"the checkpoint {source} is of another training ({state['task']}, this is "
                f"{self._facts()}): name another folder"
            )
        self._load_tensors(source, state["numbers"])
        optimizer = training.optimizer
        for own, saved in zip(optimizer.param_groups, state["groups"], strict=True):
            own.update(_restored(saved, own))
        if training.schedule is not None and state["schedule"] is not None:
            training.schedule.load_state_dict(state["schedule"])
        training.batches.go_to(state["position"])
        training.steps = self.last_written = state["steps"]
        ranks = state["spec_ranks"]
        group.say(
            f"going on from {source}, after step {training.steps}"
            + ("" if ranks == dist.get_world_size() else f"; it was written by {ranks} ranks")
        )

    def _facts(self) -> dict[str, Any]:
        """Return what has to be equal for the same samples and steps."""
        task = self.training.task
        return {"name": task.name, "batch_size": task.batch_size, "seed": task.seed}

    def _state(self) -> dict[str, Any]:
        training = self.training
        return {
            "task": self._facts(),
            "steps": training.steps,
            "position": training.batches.position(),
            "spec": to_plain(training.spec),
            "spec_ranks": dist.get_world_size(),
            "groups": [
                {key: _plain(value) for key, value in group.items() if key != "params"}
                for group in training.optimizer.param_groups
            ],
            "schedule": _plain_schedule(training.schedule),
        }

    def _named(self) -> dict[str, torch.Tensor]:
        """Return what the parts of the model hold, by its name in the whole model."""
        return {
            name: tensor
            for part in self.training.built.parts
            for name, tensor in part.state_dict(keep_vars=True).items()
            if name in self.training.built.saved
        }

    def _optimizer_states(self) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """Yield name, parameter and optimizer state of what this rank updates."""
        optimizer = getattr(self.training.optimizer, "optim", self.training.optimizer)
        names = {id(tensor): name for name, tensor in self._named().items()}
        for one in optimizer.param_groups:
            for parameter in one["params"]:
                if id(parameter) in names:
                    yield names[id(parameter)], parameter, optimizer.state[parameter]

    def _tensors(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            f"model/{name}": tensor.detach() for name, tensor in self._named().items()
        }
        for name, _, state in self._optimizer_states():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[f"optimizer/{name}/{key}"] = value
        return found

    def _gathered_numbers(self) -> dict[str, Any]:
        """Return what optimizers keep that is no tensor, of all ranks."""
        own = {
            f"{name}/{key}": _plain(value)
            for name, _, state in self._optimizer_states()
            for key, value in state.items()
            if not isinstance(value, torch.Tensor)
        }
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return {key: value for one in found for key, value in one.items()}

    def _load_tensors(self, source: Path, numbers: Mapping[str, Any]) -> None:
        reader = FileSystemReader(source)
        stored: Mapping[str, Any] = reader.read_metadata().state_dict_metadata
        wanted: dict[str, Any] = {}
        for name, tensor in self._named().items():
            facts = stored.get(f"model/{name}")
            if not isinstance(facts, TensorStorageMetadata) or facts.size != tensor.shape:
                raise UserError(f"the checkpoint {source} has no {name} of {tuple(tensor.shape)}")
            wanted[f"model/{name}"] = tensor.detach()
        states: dict[str, dict[str, dict[str, Any]]] = {}
        for key, facts in stored.items():
            kind, _, rest = key.partition("/")
            name, _, entry = rest.rpartition("/")
            if kind == "optimizer":
                states.setdefault(name, {})[entry] = facts
        held: list[tuple[dict[str, Any], str, str]] = []
        for name, parameter, state in self._optimizer_states():
            for entry, facts in states.get(name, {}).items():
                state[entry] = _room_for(parameter, entry, facts)
                wanted[f"optimizer/{name}/{entry}"] = state[entry]
                held.append((state, entry, f"optimizer/{name}/{entry}"))
            for key, value in numbers.items():
                owner, _, entry = key.rpartition("/")
                if owner == name:
                    state[entry] = value
        load(wanted, storage_reader=reader)
        for state, entry, key in held:
            state[entry] = wanted[key]


def _room_for(parameter: torch.Tensor, entry: str, facts: Any) -> torch.Tensor:
    """Return memory for what an optimizer keeps of a parameter, laid out as it is."""
    dtype = facts.properties.dtype
    if facts.size == parameter.shape and (entry != "step" or parameter.ndim):
        return torch.zeros_like(parameter.detach(), dtype=dtype)
    device = parameter.to_local().device if isinstance(parameter, DTensor) else parameter.device
    is_count = not facts.size  # AdamW counts on the CPU, unless it is fused
    return torch.zeros(facts.size, dtype=dtype, device="cpu" if is_count else device)


def _plain(value: Any) -> Any:
    """Return a setting as JSON has it."""
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


def _restored(saved: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Return saved settings of a parameter group in the types that it has."""
    found = {}
    for key, value in saved.items():
        if key in ("foreach", "fused"):  # these follow from how the model is spread now
            continue
        known = own.get(key)
        if isinstance(known, torch.Tensor):
            value = torch.tensor(value, dtype=known.dtype, device=known.device)
        elif isinstance(known, tuple):
            value = tuple(value)
        found[key] = value
    return found


def _plain_schedule(schedule: Any) -> Any:
    if schedule is None:
        return None
    state = {key: value for key, value in schedule.state_dict().items() if not callable(value)}
    try:
        return json.loads(json.dumps(state, default=_plain))
    except TypeError as error:
        raise UserError(
            f"the schedule {type(schedule).__name__} keeps what no checkpoint can hold ({error})"
        ) from None


def _write_json(path: Path, value: Any) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(value, file)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
