"""Processes beside this one that make a loader's batches, so that no core is idle.

What a sample takes of a core is more when the other cores work, too: they share caches, the way to
the memory and often the execution units themselves. So a limit of all cores is measured on all.
"""

import contextlib
import os
import signal
from typing import Any

import torch

from flatout.profiling.drawing import made_here, start_as_worker
from flatout.seams.processes import die_with_parent

MOST = 15
"""Processes at most: what cores share is busy by then."""


class Company:
    """So many processes that make batches of one loader and throw them away."""

    def __init__(self, number: int) -> None:
        self.number = min(number, MOST)
        self.processes: list[Any] = []

    def start(self, loader: Any) -> None:
        """Fork them, once; they end with this process at the latest."""
        from torch import multiprocessing as mp

        if self.processes:
            return
        context = mp.get_context("fork")
        self.processes = [
            context.Process(target=_make, args=(loader,), daemon=True) for _ in range(self.number)
        ]
        for process in self.processes:
            process.start()

    def end(self) -> None:
        """End them."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(2.0)
        self.processes = []


def _make(loader: Any) -> None:
    die_with_parent()
    # What a sample prints or raises was said by the training process already.
    with contextlib.suppress(BaseException):
        torch.set_num_threads(1)
        start_as_worker(getattr(loader, "worker_init_fn", None))
        for _ in made_here(loader):
            pass
    os.kill(os.getpid(), signal.SIGKILL)  # no exit handler of the script's runs here
