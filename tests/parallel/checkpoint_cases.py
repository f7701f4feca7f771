"""Trainings that stop and go on, on other numbers of ranks; run on several ranks at once."""

import errno
import json
import os
import pickle
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.optim.lr_scheduler import StepLR

from flatout.parallel import checkpoint
from flatout.parallel.task_training import TaskTraining
from flatout.records.errors import UserError
from flatout.records.parallel import ParallelSpec
from tests.parallel.exact_cases import difference, held, reference
from tests.parallel.models import language

ROUTES = {
    "sharded": {
        2: {"dp_shard": 2, "zero": 3},
        4: {"dp_shard": 2, "zero": 2, "tp": 2},
        1: {},
    },
    "replicated": {
        2: {"dp_shard": 2, "zero": 1},
        4: {"pp": 2, "dp_replicate": 2, "microbatches": 2},
        1: {},
    },
}
"""The spec at each number of ranks."""
STOPS = {"first": 2, "second": 5, "third": 7, "last": 10}
"""Steps after which each of the runs stops: 2 ranks, 4, 1 and 2 again; an epoch has four."""


def task():
    return language(steps=10, schedule=lambda optimizer: StepLR(optimizer, 2, gamma=0.7))


def run(name):
    """Train up to a stop, from where the run before stopped."""
    route, stop = name.split("_")
    folder = str(Path(os.environ["CHECKPOINTS"]) / route)
    sizes = ROUTES[route][dist.get_world_size()]
    spec = ParallelSpec(**sizes, checkpoint=folder, checkpoint_every=100)
    training = TaskTraining(task(), spec, torch.device("cpu"))
    for _ in training.run(STOPS[stop]):
        pass
    training.checkpoints.save()
    found = {"parameter": None, "steps": training.steps}
    if stop == "last":
        parameters = held(training, lambda parameter: parameter)
        found["parameter"] = difference(parameters, reference(task())[2])
    return found


def sharded(folder, **changes):
    """Return a training on two ranks that writes a checkpoint after every second step."""
    known = {"dp_shard": 2, "zero": 3, "checkpoint": folder, "checkpoint_every": 2}
    return TaskTraining(task(), ParallelSpec(**known | changes), torch.device("cpu"))


def train(training, until):
    for _ in training.run(until):
        pass
    return training.steps


def went_on(folder):
    """Return the step that a new training goes on from, or the refusal."""
    training = sharded(folder)
    try:
        training.checkpoints.load_latest()
    except UserError as error:
        return str(error)
    return training.steps


def on_first(act, *arguments):
    """Do something on rank 0 while the others wait."""
    if dist.get_rank() == 0:
        act(*arguments)
    dist.barrier()


def damaged():
    """Damage each file of the newest of two checkpoints in turn, in several ways; then both."""
    folder = Path(os.environ["CHECKPOINTS"]) / "damaged"
    train(sharded(str(folder)), 4)
    found = {}
    names: list = [None]
    if dist.get_rank() == 0:
        names = [sorted(path.name for path in (folder / "step-000000004").iterdir())]
    dist.broadcast_object_list(names, 0)
    for name in names[0]:
        path = folder / "step-000000004" / name
        whole = path.read_bytes()
        dist.barrier()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 4]) + whole[middle + 1 :]
        for how, data in (("flip", flipped), ("short", whole[:-1]), ("empty", b"")):
            on_first(path.write_bytes, data)
            found[f"{name} {how}"] = went_on(str(folder))
        on_first(path.unlink)
        found[f"{name} missing"] = went_on(str(folder))
        on_first(path.write_bytes, whole)
    found["whole"] = went_on(str(folder))
    for step in (2, 4):
        on_first((folder / f"step-{step:09d}" / ".metadata").write_bytes, b"junk")
    found["both"] = went_on(str(folder))
    return found


def full_disk():
    """Let each kind of write fail on each rank, go on, and write the last one at the end."""
    folder = Path(os.environ["CHECKPOINTS"]) / "full"
    training = sharded(str(folder), checkpoint_every=100)
    train(training, 1)
    training.checkpoints.save()
    found = {}
    for place in ("flatout.parallel.checkpoint._sum_of", "os.fsync", "pathlib.Path.rename"):
        for rank in (0, 1):
            train(training, training.steps + 1)
            error = OSError(errno.ENOSPC, "No space left on device")
            with patch(place, side_effect=error) if dist.get_rank() == rank else nullcontext():
                training.checkpoints.save()
            dist.barrier()
            found[f"{place} {rank}"] = {
                "steps": training.steps,
                "written": training.checkpoints.last_written,
                "names": sorted(path.name for path in folder.glob("step-*")),
                "drafts": [path.name for path in folder.glob(".writing-*")],
            }
            dist.barrier()
    train(training, training.steps + 1)
    with patch("os.fsync", side_effect=OSError(errno.ENOSPC, "No space left on device")):
        try:
            training.checkpoints.save(is_last=True)
        except UserError as error:
            found["last"] = str(error)
    return found


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def hostile():
    """Put code, and a way out of the folder, into torch's description, with the right checksums."""
    folder = Path(os.environ["CHECKPOINTS"]) / "hostile"
    train(sharded(str(folder)), 2)
    source = folder / "step-000000002"
    description = FileSystemReader(source).read_metadata()
    dist.barrier()  # every rank has read it before rank 0 writes another
    found = {}
    outside = replace(next(iter(description.storage_data.values())), relative_path="../other")
    leads = replace(description, storage_data=dict.fromkeys(description.storage_data, outside))
    for name, content in (("code", Evil(str(folder / "ran"))), ("path", leads)):
        if dist.get_rank() == 0:
            (source / ".metadata").write_bytes(pickle.dumps(content))
            text = (source / "training.json").read_text().partition("\n")[2]
            state = json.loads(text)
            state["files"][".metadata"] = checkpoint._sum_of(source / ".metadata")
            checkpoint._write_json(source / "training.json", state)
        dist.barrier()
        found[name] = went_on(str(folder))
    return found | {"ran": (folder / "ran").exists()}


def held_by_another():
    """Begin a training in the folder of one that runs in another process."""
    folder = Path(os.environ["CHECKPOINTS"]) / "held"
    other = None
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
        code = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
        code += "; print('held', flush=True); sys.stdin.read()"
        words = [sys.executable, "-c", code, str(folder / ".lock")]
        other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        other.stdout.readline()
    dist.barrier()
    found = {"while": went_on(str(folder))}
    dist.barrier()
    if other is not None:
        other.kill()
        other.wait()
    dist.barrier()
    return found | {"after": went_on(str(folder))}
