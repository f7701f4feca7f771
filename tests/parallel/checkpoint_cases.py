"""Trainings that stop and go on, on other numbers of ranks; run on several ranks at once."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import StepLR

from flatout.parallel.task_training import TaskTraining
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
