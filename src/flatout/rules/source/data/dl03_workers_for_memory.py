"""Workers copy tensors that are in memory already."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.edits import set_argument, suggested
from flatout.analysis.source.script import Issue, Script, argument, has_unpacked
from flatout.analysis.source.training import train_loaders, worker_count
from flatout.records.finding import Edit

IN_MEMORY = "torch.utils.data.TensorDataset"
OF_WORKERS = {
    "persistent_workers": "False",
    "prefetch_factor": "None",
    "multiprocessing_context": "None",
}
"""What a loader without workers refuses to be given, and what it takes."""


def check(script: Script) -> Iterator[Issue]:
    """Report loaders of a `TensorDataset` with workers."""
    for call in train_loaders(script):
        dataset = argument(call, "dataset", 0)
        workers = worker_count(call)
        if dataset is None or not isinstance(workers, int) or workers < 1:
            continue
        if script.called(script.origin(dataset)) != IN_MEMORY:
            continue
        yield Issue(
            node=call,
            because=(
                "the samples are in memory: workers that pick rows and send them back take longer "
                "than picking them here"
            ),
            instead="num_workers=0, or keep the tensors on the GPU and index them there",
            fix=None if has_unpacked(call) else suggested(_without_workers(script, call)),
        )


def _without_workers(script: Script, call: ast.Call) -> Iterator[Edit | None]:
    yield set_argument(script, call, "num_workers", "0", 5)
    for name, value in OF_WORKERS.items():
        if argument(call, name) is not None:
            yield set_argument(script, call, name, value)
