"""Kill ranks at random moments: `python -m tests.parallel.kills FOLDER KILLS`.

Two ranks train, one of them is killed, both are started again; and so on. It prints how many kills
there were, and what became of samples and weights.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

STEPS, SAMPLES, BATCH = 24, 32, 8


def main(folder, kills):
    """Kill, and print what became of it."""
    import torch

    import tests.parallel.exact_cases  # noqa: F401  once, for all ranks that are forked

    torch.set_num_threads(1)
    chance = random.Random(7)
    found = {"kills": 0, "trainings": 0, "wrong_epochs": 0, "other_weights": 0}
    place = folder / "undisturbed"
    undisturbed = train_until_done(place, chance, kills=0, step_s=0)[1]
    # Kills come about every second step, however fast this machine is: it has to get on at all.
    began, ended = (place / "begun-1").stat().st_mtime, (place / "weights.pt").stat().st_mtime
    step_s = (ended - began) / (STEPS - 1)
    while found["kills"] < kills:
        place = folder / str(found["trainings"])
        left = kills - found["kills"]
        killed, weights = train_until_done(place, chance, kills=left, step_s=step_s)
        found["kills"] += killed
        found["trainings"] += 1
        found["other_weights"] += not torch.equal(weights, undisturbed)
        found["wrong_epochs"] += wrong_epochs(place)
    sys.stdout.write(json.dumps(found) + "\n")


def train_until_done(folder, chance, kills, step_s):
    """Return how many kills it took, and the weights at the end."""
    import torch

    folder.mkdir(parents=True)
    killed = attempt = 0
    while not (folder / "weights.pt").exists():
        attempt += 1
        children = [start(rank, attempt, folder) for rank in range(2)]
        begun = folder / f"begun-{attempt}"
        while not begun.exists():
            time.sleep(0.005)
        if killed < kills:
            time.sleep(chance.uniform(0, 4 * step_s))
            os.kill(chance.choice(children), signal.SIGKILL)
            time.sleep(0.02)
            # As torchrun does: the ranks that are left cannot go on.
            for child in children:
                os.kill(child, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        killed += -signal.SIGKILL in codes
    return killed, torch.load(folder / "weights.pt")


def start(rank, attempt, folder):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(rank, attempt, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(code)
    return child


def train(rank, attempt, folder):
    import torch
    import torch.distributed as dist

    from flatout.parallel.task_training import TaskTraining
    from flatout.records.parallel import ParallelSpec
    from tests.parallel.exact_cases import held
    from tests.parallel.models import Tokens, language

    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting-{attempt}", rank=rank, world_size=2
    )
    spec = ParallelSpec(dp_shard=2, zero=2, checkpoint=str(folder / "saved"), checkpoint_every=1)

    class Numbered(Tokens):
        def __getitem__(self, number):
            return *super().__getitem__(number), number

    def loss(model, batch):
        used.append(batch[2].tolist())
        return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    used = []
    task = language(data=lambda: Numbered(SAMPLES), loss=loss, steps=STEPS)
    training = TaskTraining(task, spec, torch.device("cpu"))
    log = (folder / f"used-{rank}").open("a")
    for step in training.run():
        begun = folder / f"begun-{attempt}"
        if rank == 0 and not begun.exists():
            begun.touch()
        log.write(json.dumps([step.number, step.epoch, used[-1]]) + "\n")
        log.flush()
    weights = held(training, lambda parameter: parameter)
    if rank == 0:
        if not (folder / f"begun-{attempt}").exists():
            (folder / f"begun-{attempt}").touch()
        whole = torch.cat([weights[name].flatten() for name in sorted(weights)])
        torch.save(whole, folder / "writing.pt")
        (folder / "writing.pt").rename(folder / "weights.pt")
    dist.barrier()


def wrong_epochs(folder):
    """Return in how many epochs a sample was lost or used twice, by the steps that count."""
    by_step = {}
    for rank in range(2):
        for line in (folder / f"used-{rank}").read_text().splitlines():
            number, epoch, samples = json.loads(line)
            by_step[number, rank] = epoch, samples  # a later attempt's step takes its place
    epochs = {}
    for epoch, samples in by_step.values():
        epochs.setdefault(epoch, []).extend(samples)
    whole = [sorted(samples) == list(range(SAMPLES)) for samples in epochs.values()]
    return whole.count(False) + (len(whole) != STEPS * BATCH // SAMPLES)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
