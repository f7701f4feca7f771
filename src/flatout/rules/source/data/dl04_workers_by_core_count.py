"""The number of workers is that of the machine's cores, whatever this process may use."""

from collections.abc import Iterator

from flatout.analysis.source.edits import imported, replaced, suggested
from flatout.analysis.source.script import Issue, Script, argument
from flatout.analysis.source.training import train_loaders

COUNTS = ("os.cpu_count", "multiprocessing.cpu_count", "torch.multiprocessing.cpu_count")


def check(script: Script) -> Iterator[Issue]:
    """Report `num_workers=os.cpu_count()`."""
    for call in train_loaders(script):
        workers = argument(call, "num_workers", 5)
        made = workers and script.origin(workers)
        if workers is None or made is None or script.called(made) not in COUNTS:
            continue
        can_fix = made is workers
        yield Issue(
            node=workers,
            because=(
                "cpu_count is that of the machine: in a container, under SLURM or next to other "
                "ranks, so many workers take the cores from each other"
            ),
            instead="len(os.sched_getaffinity(0)), shared among the ranks, or what tune finds",
            fix=suggested(
                replaced(script, made, "len(os.sched_getaffinity(0))"), imported(script, "os", call)
            )
            if can_fix
            else None,
        )
