"""Train a Task on several ranks: `python -m flatout.parallel.task_ranks mytask.py:task`.

torchrun starts it once for each rank, as `flatout run --ranks N` has it do; the recipe's table
`[parallel]` says how the training is spread. Started without torchrun it is the only rank.
"""

import os
import sys
import time
import traceback

import torch
import torch.distributed as dist

from flatout.agent.bootstrap import SPEC_VARIABLE
from flatout.agent.task import Task
from flatout.agent.task_loop import device_of
from flatout.agent.task_runner import load_task
from flatout.parallel import group
from flatout.parallel.task_training import TaskTraining
from flatout.records.errors import UserError
from flatout.records.input_files import read_json
from flatout.records.json_records import from_plain
from flatout.records.parallel import ParallelSpec, check_world
from flatout.records.trial_spec import TrialSpec

FIRST_WORD_S = 5.0
"""The other ranks end this much later with a mistake that all of them find: rank 0 says it."""
FAILED = 1


def main(arguments: list[str]) -> int:
    """Train the task that is named, as one of its ranks; return the exit code."""
    spec = _spec()
    if not group.join(spec.world_size):
        dist.init_process_group(
            "nccl" if torch.cuda.is_available() else "gloo",
            store=dist.HashStore(),  # type: ignore[attr-defined]  # it is there
            rank=0,
            world_size=1,
        )
    rank = dist.get_rank()
    try:
        check_world(spec, dist.get_world_size())
        if len(arguments) != 1:
            raise UserError("give one task, as in: mytask.py:task")
        task = load_task(arguments[0])
        _train(task, spec)
    except UserError as error:
        time.sleep(FIRST_WORD_S if rank else 0.0)
        group.stop(str(error))
    except Exception:  # noqa: BLE001  whatever it is, this rank has to end before the others wait
        sys.stdout.flush()
        sys.stderr.write(traceback.format_exc())
        last = traceback.format_exc().strip().splitlines()[-1]
        sys.stderr.write(f"flatout: rank {rank}: the Task failed: {last}\n")
        sys.stderr.flush()
        os._exit(FAILED)
    dist.destroy_process_group()
    return 0


def _spec() -> ParallelSpec:
    """Return how the training is spread, from what flatout wrote for this process."""
    plain = read_json(os.environ[SPEC_VARIABLE])
    found = from_plain(TrialSpec, plain).recipe.parallel
    assert found is not None, "flatout starts this for recipes with a table [parallel] only"
    return found


def _train(task: Task, spec: ParallelSpec) -> None:
    """Train with one line an epoch from rank 0, which is then given the whole model."""
    is_cuda = dist.get_backend() == "nccl"
    device = group.device_of_group() if is_cuda else device_of(task)
    training = TaskTraining(task, spec, device)
    group.say(f"{dist.get_world_size()} ranks: {spec.label}")
    last = None
    for step in training.run():
        if last is not None and step.epoch != last.epoch:
            _report(f"{task.name}: epoch {last.epoch} loss {last.loss.item():.4f}\n")
        last = step
    if last is None:
        _report(f"{task.name}: nothing is left to train after {training.steps} steps\n")
    else:
        _report(
            f"{task.name}: epoch {last.epoch} loss {last.loss.item():.4f}, {last.number} steps\n"
        )
    if training.checkpoints is not None:
        training.checkpoints.save(is_last=True)
    model = training.whole_model()
    if model is not None:
        task.finish(model)
    dist.barrier()


def _report(line: str) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
