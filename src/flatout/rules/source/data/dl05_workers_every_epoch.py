"""Workers end with every epoch and start again for the next."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, constant, has_unpacked
from flatout.analysis.source.training import loops_over, train_loaders, worker_count
from flatout.rules.source.data.dl03_workers_for_memory import IN_MEMORY


def check(script: Script) -> Iterator[Issue]:
    """Report loaders with workers, not persistent, that a loop within a loop draws from."""
    for call in train_loaders(script):
        workers = worker_count(call)
        kept = argument(call, "persistent_workers")
        if not isinstance(workers, int) or workers < 1 or has_unpacked(call):
            continue
        dataset = argument(call, "dataset", 0)
        if dataset is not None and script.called(script.origin(dataset)) == IN_MEMORY:
            continue  # it should have no workers at all: DL03
        if kept is not None and constant(kept) is not False:
            continue
        if not any(is_repeated(script, loop, call) for loop in loops_over(script, call)):
            continue
        yield Issue(
            node=call,
            because=(
                f"{workers} workers end with every epoch and start again, data set and all: the "
                "first batch of each epoch waits for them"
            ),
            instead="persistent_workers=True",
            fix=suggested(set_argument(script, call, "persistent_workers", "True")),
        )


def is_repeated(script: Script, loop: ast.For, loader: ast.Call) -> bool:
    """Return whether a loop is within another one that does not make the loader again as well."""
    return not set(script.loops(loop)) <= set(script.loops(loader))
