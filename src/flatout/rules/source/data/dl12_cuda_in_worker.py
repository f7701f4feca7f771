"""Samples are put on the GPU where they are read."""

import ast
from collections.abc import Iterator

from flatout.analysis.source.script import Issue, Script, argument
from flatout.analysis.source.training import is_device, is_device_move, worker_functions


def check(script: Script) -> Iterator[Issue]:
    """Report copies to a GPU in `__getitem__`, `__iter__` and functions that collate."""
    for function, name in worker_functions(script):
        for call in script.within(function, ast.Call):
            device = argument(call, "device")
            makes = device is not None and script.called(call).startswith("torch.")
            if not is_device_move(script, call) and not (
                makes and device is not None and is_device(script, device)
            ):
                continue
            if script.source(call.func).startswith(("self.model", "model")):
                continue
            yield Issue(
                node=call,
                because=(
                    f"{name} uses the GPU: a forked worker cannot (CUDA fails), and without "
                    "workers each sample is copied alone"
                ),
                instead="leave samples on the CPU, and copy whole batches in the training loop",
            )
