"""Checkpoints of a training on several ranks, which go on with any number of them.

Tensors are stored by torch's distributed checkpoint, under the names of the whole model, each rank
its part; all else is JSON. A checkpoint is written under a temporary name, brought to the disk and
then renamed: one with a final name is whole, whenever a rank was killed. It names its files with
their checksums: one that was damaged later is not trained from, the one before it is.
"""

import errno
import fcntl
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
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
DESCRIPTION = ".metadata"
"""Torch's, of what is in which file."""
KEPT = 2
"""Checkpoints that stay: the newest may be the one whose disk block fails."""
NAME = "step-{:09d}"
LOCK = ".lock"
PIECE = 2**20
"""Bytes that are summed at once."""
DESCRIBED_BY = {
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "torch": ("Size",),
    "pathlib": ("PosixPath", "WindowsPath"),
}
"""What torch's description of a checkpoint is made of, apart from its own classes and dtypes."""

NOT_A_DESCRIPTION = (
    *(pickle.UnpicklingError, AttributeError, EOFError, ImportError, LookupError, TypeError),
    ValueError,
)
"""What pickle raises for what is none."""


class _NotSoundError(Exception):
    """A checkpoint cannot be written or read; every rank is given the reason of one that failed."""


class _Description(pickle.Unpickler):
    """Reads torch's description of a checkpoint, which is a pickle, and runs no code of it."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what a description may be made of.

        Raises:
            pickle.UnpicklingError: for anything else.
        """
        found = None
        is_own = module == "torch.distributed.checkpoint.metadata"
        if is_own or module == "torch" or name in DESCRIBED_BY.get(module, ()):
            found = super().find_class(module, name)
        if name in DESCRIBED_BY.get(module, ()) or isinstance(found, torch.dtype):
            return found
        if is_own and isinstance(found, type) and found.__module__ == module:
            return found
        raise pickle.UnpicklingError(f"it wants to load {module}.{name}")


class _Reader(FileSystemReader):
    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """Return the description, once it is known to lead to no file outside the checkpoint."""
        try:
            with Path(self.path, DESCRIPTION).open("rb") as file:
                found: Metadata = _Description(file).load()
            for info in found.storage_data.values():
                if Path(info.relative_path).name != info.relative_path:
                    raise pickle.UnpicklingError(f"it leads to {info.relative_path}")
        except NOT_A_DESCRIPTION as error:
            raise UserError(f"the checkpoint {self.path} is not of flatout: {error}") from None
        return found


class Checkpoints:
    """The checkpoints of one training."""

    def __init__(self, training: "TaskTraining", folder: str) -> None:
        self.training = training
        self.folder = Path(folder)
        self.lock: IO[str] | None = None
        self.last_written = -1

    def after_step(self, part: "PartOfBatch") -> None:
        """Write one where the table asks for it after this step."""
        training = self.training
        every = training.spec.checkpoint_every
        ends_epoch = training.batches.is_last_of_epoch(part)
        if training.steps % every == 0 if every else ends_epoch:
            self.save()

    def save(self, *, is_last: bool = False) -> None:
        """Write a checkpoint; every rank takes part. Again after the same step does nothing.

        A disk that is full ends no training: the checkpoints before stay, and the next one may fit.

        Raises:
            UserError: where the last one cannot be written.
        """
        steps = self.training.steps
        if steps == self.last_written:
            return
        try:
            self._write(steps)
        except _NotSoundError as error:
            text = f"no checkpoint after step {steps} in {self.folder}: {error}"
            if is_last:
                raise UserError(text) from None
            group.say(f"{text}; the training goes on, and those before stay")
            return
        self.last_written = steps

    def _write(self, steps: int) -> None:
        final, written = self.folder / NAME.format(steps), self.folder / f".writing-{steps}"
        is_first = dist.get_rank() == 0
        try:
            with _together():
                if is_first:
                    self.folder.mkdir(parents=True, exist_ok=True)
                    for leftover in self.folder.glob(".writing-*"):
                        shutil.rmtree(leftover)
                    written.mkdir()
            try:
                save(self._tensors(), storage_writer=FileSystemWriter(written, sync_files=True))
            except CheckpointException as error:  # on every rank, where one failed
                raise _NotSoundError(next(iter(error.failures.values()))[0]) from None
            rows = self._gathered_numbers()
            own: dict[str, int] = {}
            with _together():
                own = {path.name: _sum_of(path) for path in written.glob(f"__{dist.get_rank()}_*")}
            sums = _gathered(own)
            with _together():
                if is_first:
                    self._finish(written, final, self._state() | {"numbers": rows, "files": sums})
        except _NotSoundError:
            if is_first:
                shutil.rmtree(written, ignore_errors=True)
            raise
        if is_first:
            for old in sorted(self.folder.glob("step-*"))[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def _finish(self, written: Path, final: Path, state: dict[str, Any]) -> None:
        """Describe what is written, bring it to the disk, and give it its final name."""
        if lost := [name for name in state["files"] if not (written / name).exists()]:
            raise _NotSoundError(f"the hosts do not share this folder: {lost[0]} is not in it")
        state["files"][DESCRIPTION] = _sum_of(written / DESCRIPTION)
        _write_json(written / STATE, state)
        _sync_folder(written)
        if final.exists():  # a damaged one, from before
            shutil.rmtree(final)
        written.rename(final)
        _sync_folder(self.folder)

    def _hold(self) -> None:
        """Keep other trainings out of the folder until this process ends, however it does.

        Such a lock is not inherited by loader workers, and NFS has it, too.
        """
        if self.lock is not None:  # to open it again and close it would let go of it
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = (self.folder / LOCK).open("w")
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                raise _NotSoundError("another training writes its checkpoints there") from None
            # Some network file systems have no locks: two trainings are then not noticed.
        self.lock = lock

    def _newest(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint that is as it was written, and its state; None without any.

        Raises:
            UserError: where there are some, and none of them is; where another training uses the
                folder, or it cannot be made.
        """
        names: list[Any] = [None]
        try:
            with _together():
                if dist.get_rank() == 0:
                    self._hold()
        except _NotSoundError as error:
            raise UserError(f"checkpoint {self.folder}: {error}; name another folder") from None
        if dist.get_rank() == 0:
            names = [sorted((path.name for path in self.folder.glob("step-*")), reverse=True)]
        dist.broadcast_object_list(names, 0)
        damaged = []
        for name in names[0]:
            state: dict[str, Any] = {}
            try:
                with _together():
                    state = _read_sound(self.folder / name)
            except _NotSoundError as error:
                damaged.append(f"{name}: {error}")
                continue
            for one in damaged:
                group.say(f"damaged, so the checkpoint before it is used: {self.folder}/{one}")
            return self.folder / name, state
        if damaged:
            raise UserError(
                f"every checkpoint in {self.folder} is damaged ({'; '.join(damaged)}): "
                "put one back, or remove them to begin again"
            )
        return None

    def load_latest(self) -> None:
        """Go on from the newest sound checkpoint; without any from the beginning.

        Raises:
            UserError: where it is of another model or another training, or none is sound.
        """
        found = self._newest()
        if found is None:
            return
        source, state = found
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
        return _gathered(own)

    def _load_tensors(self, source: Path, numbers: Mapping[str, Any]) -> None:
        reader = _Reader(source)
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


@contextmanager
def _together() -> Iterator[None]:
    """Raise on all ranks what the file system refused to one of them; they wait for each other."""
    own = ""
    try:
        yield
    except (OSError, _NotSoundError) as error:
        own = str(error)
    found = [""] * dist.get_world_size()
    dist.all_gather_object(found, own)
    if any(found):
        raise _NotSoundError(next(filter(None, found)))


def _gathered(own: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return {key: value for one in found for key, value in one.items()}


def _sum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def _write_json(path: Path, value: Any) -> None:
    text = json.dumps(value)
    with path.open("w", encoding="utf-8") as file:
        file.write(f"{zlib.crc32(text.encode())}\n{text}")
        file.flush()
        os.fsync(file.fileno())


def _read_sound(source: Path) -> dict[str, Any]:
    """Return the state of a checkpoint, of whose files this rank has read its part.

    Raises:
        OSError: where something is missing.
        _NotSoundError: where something is not as it was written.
    """
    checksum, _, text = (source / STATE).read_bytes().partition(b"\n")
    if checksum != str(zlib.crc32(text)).encode():
        raise _NotSoundError(f"{STATE} is not as it was written")
    found: dict[str, Any] = json.loads(text)
    sums = found.get("files") if isinstance(found, dict) else None
    if not isinstance(sums, dict):
        raise _NotSoundError(f"{STATE} names no files")
    for name in sorted(sums)[dist.get_rank() :: dist.get_world_size()]:
        if Path(name).name != name or _sum_of(source / name) != sums[name]:
            raise _NotSoundError(f"{name} is not as it was written")
    return found


def _sync_folder(folder: Path) -> None:
    """Bring the names in a folder to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
