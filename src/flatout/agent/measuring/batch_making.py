"""Make a loader's batches as a worker would, without its workers.

`made_here` makes them in the training process; `Company` makes them in processes alongside it, so
that no core is idle.
"""

import contextlib
import mmap
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.utils.data.dataloader as loading

from flatout.agent.hooks.loader import as_received
from flatout.agent.nested import map_leaves
from flatout.agent.processes import die_with_parent, reopen_files
from flatout.agent.samples import samples_in, size_chosen

dataloader: Any = loading
"""Its iterators and fetchers are no one's public interface, and torch gives them no types."""


class _TimedSet:
    """A data set that notes what each of its samples takes."""

    def __init__(self, dataset: Any, took: list[tuple[Any, float]]) -> None:
        self.dataset, self.took = dataset, took

    def __getitem__(self, number: Any) -> Any:
        began = time.perf_counter()
        sample = self.dataset[number]
        self.took.append((number, time.perf_counter() - began))
        return sample


def made_here(loader: Any, took: list[tuple[Any, float]] | None = None) -> Iterator[Any]:
    """Yield the loader's batches, made in this process whatever workers it has; more than once.

    Each as the loop receives it, as a worker sends it, and how many samples were chosen for it.
    `took` is given number and seconds of each sample that is made alone.
    """
    is_single = loader._auto_collation and not hasattr(loader.dataset, "__getitems__")
    while True:
        fetcher = fetcher_of(loader)
        if took is not None and is_single and hasattr(fetcher.dataset, "__getitem__"):
            fetcher.dataset = _TimedSet(fetcher.dataset, took)
        drawn = False
        for numbers in iter(loader._index_sampler):
            try:
                batch = fetcher.fetch(numbers)
            except StopIteration:
                break
            drawn = True
            received = as_received(loader.collate_fn, batch)
            yield received, map_leaves(batch, _as_sent), size_chosen(numbers)
        if not drawn:
            return


def fetcher_of(loader: Any) -> Any:
    """Return what makes a loader's batches in a process of its own."""
    return dataloader._DatasetKind.create_fetcher(
        loader._dataset_kind,
        loader.dataset,
        loader._auto_collation,
        loader.collate_fn,
        loader.drop_last,
    )


def _as_sent(leaf: Any) -> Any:
    """Return the bytes of a leaf that travels packed; any other as it is."""
    packed = getattr(leaf, "bytes", None)
    return packed if isinstance(packed, torch.Tensor) else leaf


def start_as_worker(start: Any) -> None:
    """Do what a recipe's techniques do when a worker starts, and nothing that the script does."""
    while start is not None:
        if hasattr(start, "start_here"):
            start.start_here()
        start = getattr(start, "then", None) or getattr(start, "asked", None)


MOST = 15
"""Processes at most: what cores share is busy by then."""


class Company:
    """So many processes that make batches of one loader and throw them away.

    What a sample takes of a core is more when the other cores work, too: they share caches, the way
    to the memory and often the execution units themselves. So a limit of all cores is measured on
    all.
    """

    def __init__(self, number: int) -> None:
        self.number = min(number, MOST)
        self.processes: list[Any] = []
        # Samples and CPU seconds of each, in memory that they share with this process.
        self._made = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE))[: 2 * MOST].reshape(MOST, 2)

    def start(self, loader: Any) -> None:
        """Fork them, once; they end with this process at the latest."""
        from torch import multiprocessing as mp

        if self.processes:
            return
        context = mp.get_context("fork")
        self.processes = [
            context.Process(target=_make, args=(loader, self._made[place]), daemon=True)
            for place in range(self.number)
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

    @property
    def made(self) -> tuple[int, float]:
        """Samples that they made so far, and the CPU seconds these took."""
        samples, cpu_s = self._made.sum(axis=0)
        return int(samples), float(cpu_s)


def _make(loader: Any, made: "np.ndarray[Any, Any]") -> None:
    die_with_parent()
    reopen_files()
    # What a sample prints or raises was said by the training process already.
    with contextlib.suppress(BaseException):
        torch.set_num_threads(1)
        start_as_worker(getattr(loader, "worker_init_fn", None))
        batches = made_here(loader)
        next(batches)  # opens files, imports
        samples, began_s = 0, time.process_time()
        for received, _, chosen in batches:
            samples += samples_in(received, chosen, loader.batch_size)
            made[:] = samples, time.process_time() - began_s
    os.kill(os.getpid(), signal.SIGKILL)  # no exit handler of the script's runs here
