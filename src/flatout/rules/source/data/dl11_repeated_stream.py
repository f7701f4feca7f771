"""Every worker reads the whole stream."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Function, Issue, Script, argument, constant
from flatout.analysis.source.training import (
    ITERABLE,
    dataset_classes,
    may_have_workers,
    train_loaders,
)

DRAWS = ("torch.rand", "random.")
"""What differs from worker to worker without any help; NumPy's numbers do not in every version."""
SPLITS = ("get_worker_info", "worker_init_fn", "split_by_worker", "worker_id", "num_workers")


def check(script: Script) -> Iterator[Issue]:
    """Report iterable data sets that ask for no worker where a loader gives them workers."""
    for owner in dataset_classes(script, ITERABLE):
        reader = script.method(owner, "__iter__")
        if reader is None or any(word in script.source(owner) for word in SPLITS):
            continue
        if _draws_forever(script, reader):
            continue
        loader = next(
            (
                call
                for call in train_loaders(script)
                if may_have_workers(call)
                and argument(call, "worker_init_fn") is None
                and (dataset := argument(call, "dataset", 0)) is not None
                and script.class_of(dataset) is owner
            ),
            None,
        )
        if loader is None or "get_worker_info" in script.text:
            continue
        yield Issue(
            node=reader,
            because=(
                f"{owner.name} gives every worker the whole stream: each sample is trained on once "
                f"for each worker of line {loader.lineno}"
            ),
            instead=(
                "worker = torch.utils.data.get_worker_info(), and every "
                "worker.num_workers-th sample from worker.id on"
            ),
        )


def _draws_forever(script: Script, reader: Function) -> bool:
    """Return whether a stream has no end and is drawn: torch seeds each worker differently."""
    endless = (constant(each.test) for each in script.within(reader, ast.While))
    drawn = (script.qualified(call.func) for call in script.within(reader, ast.Call))
    return any(endless) and any(name.startswith(DRAWS) for name in drawn)
