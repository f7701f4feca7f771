"""Run cases on several ranks: one Python imports torch and forks, so that eight take seconds.

`python -m tests.parallel.ranks CASES WORLD FOLDER NAME...` runs functions of the module CASES, each
on all ranks, and writes what rank 0 returned, or the error, to FOLDER/results.json.
"""

import datetime
import importlib
import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

WAIT_S = 120


def run_cases(module, world, folder, names):
    """Return the result of each case by its name."""
    command = [sys.executable, "-m", "tests.parallel.ranks", module, str(world), str(folder)]
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [*command, *names],
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    results = folder / "results.json"
    assert results.exists(), found.stdout[-2000:] + found.stderr[-4000:]
    return json.loads(results.read_text())


def main(module, world, folder, names):
    import torch

    torch.set_num_threads(1)
    cases = importlib.import_module(module)  # once, for all ranks that are forked
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            os._exit(run_rank(cases, rank, world, folder, names))
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    return max(map(abs, codes))


def run_rank(cases, rank, world, folder, names):
    import torch.distributed as dist

    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/meeting",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=WAIT_S),
    )
    results = {}
    for name in names:
        results[name] = result_of(cases, name, rank)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.barrier()
    os._exit(0)


def result_of(cases, name, rank):
    try:
        return getattr(cases, name)() if hasattr(cases, name) else cases.run(name)
    except Exception as error:  # noqa: BLE001  the test looks at it
        sys.stderr.write(f"rank {rank}, {name}:\n{traceback.format_exc()[-1500:]}\n")
        sys.stderr.flush()
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:]))
