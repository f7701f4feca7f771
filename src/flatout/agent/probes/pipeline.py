"""Make a few batches of the training loader in this process and say what each leg of them costs.

Runs when the steps of the pass are over: some batches as they are, for their CPU time, and as many
under Python's profiler, for the shares of the functions. Then one batch is sent from a forked
process as a worker sends it, for the cost of the way.
"""

import cProfile
import functools
import itertools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.agent import patching
from flatout.agent.hooks.loader import ADDRESS
from flatout.agent.measuring.batch_making import Company, dataloader, made_here, start_as_worker
from flatout.agent.measuring.batch_timer import CoreDelay
from flatout.agent.nested import leaves_of, map_leaves
from flatout.agent.processes import die_with_parent
from flatout.agent.samples import samples_in, tensor_bytes
from flatout.agent.session import Session
from flatout.analysis.worker_log import read_io

MAX_S = 3.0
"""Time for batches as they are, and once more under the profiler."""
MAX_BATCHES = 40
MIN_BATCHES = 2
MAX_SAMPLES = 10_000
MAX_FUNCTIONS = 300
"""Functions that are told, the costliest first: the rest is below a percent together."""
COMPARED = 8
"""Samples that are made twice: a flip of a coin is the same for all of them once in 256."""
SENT = 8
"""Copies of a batch that are sent; the first two warm up and do not count."""
WARM = 2
WAIT_S = 10.0
"""A batch takes milliseconds: a sender that is silent for so long will not answer any more."""
SELF = Path("/proc/self")


def start(session: Session, options: Mapping[str, Any]) -> "PipelineProbe":
    """Watch which loaders train.

    `max_s` in the options bounds the looking; `company` is the number of processes that make
    batches alongside it.
    """
    company = Company(options.get("company", 0))
    probe = PipelineProbe(session, options.get("max_s", MAX_S), company)
    patching.wrap(dataloader.DataLoader, "_get_iterator", probe.noting)
    return probe


class PipelineProbe:
    """The loaders of this process by address."""

    def __init__(self, session: Session, max_s: float, company: Company) -> None:
        self.session = session
        self.max_s = max_s
        self.company = company
        self.loaders: dict[str, Any] = {}
        self.missing: dict[str, str] = {}

    def noting(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the making of an iterator, with its loader noted."""

        @functools.wraps(make)
        def make_noted(loader: Any) -> Any:
            if self.session.is_mine():
                self.loaders[loader.__dict__.get(ADDRESS, "")] = loader
            return make(loader)

        return make_noted

    def result(self) -> Mapping[str, Any]:
        """Look at the training loader that drew the most batches."""
        seen = self.session.loaders
        training = [a for a in self.loaders if a in seen and seen[a].is_training]
        if not training:
            return {"samples": 0, "missing": {"pipeline": "no DataLoader feeds the training"}}
        loader = self.loaders[max(training, key=lambda address: seen[address].batches)]
        start_as_worker(getattr(loader, "worker_init_fn", None))
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in a worker
        try:
            return self.look(loader)
        finally:
            torch.set_num_threads(threads)

    def look(self, loader: Any) -> Mapping[str, Any]:
        """Return seconds, bytes and functions of the batches that were made."""
        took: list[tuple[Any, float]] = []
        batches = made_here(loader, took)
        next(batches, None)  # opens files, fills caches, imports
        took.clear()
        sizes: list[int] = []
        bytes_made: list[int] = []
        last: list[Any] = [None]

        def count(batch: Any) -> None:
            received, last[0], chosen = batch
            sizes.append(samples_in(received, chosen, loader.batch_size))
            bytes_made.append(tensor_bytes(last[0]))

        read = read_io(SELF)[0]
        self.company.start(loader)
        try:
            cpu_s, wall_s = self.draw(batches, count)
        finally:
            self.company.end()
        read_after = read_io(SELF)[0]
        sample_s = [(n if type(n) is int else None, each_s) for n, each_s in took[:MAX_SAMPLES]]
        profiler = cProfile.Profile()
        functions = self.profiled(batches, profiler)
        transport_s = self.sent(last[0])
        return {
            "samples": sum(sizes),
            "cpu_s": cpu_s,
            "wall_s": wall_s,
            "batch_bytes": sum(bytes_made),
            "read_bytes": read_after - read if read >= 0 and read_after >= 0 else None,
            "functions": functions,
            "transport_s": transport_s,
            "transport_samples": sizes[-1] if transport_s is not None else 0,
            "missing": self.missing,
            "is_repeated": is_repeated(loader),
            "sample_s": sample_s,
        }

    def draw(self, batches: Iterator[Any], count: Callable[[Any], None]) -> tuple[float, float]:
        """Draw batches as they are; return CPU and wall seconds, waits for a core left out."""
        cpu_s = wall_s = 0.0
        delay = CoreDelay()
        began_s = delay.read_s()
        for made in range(MAX_BATCHES):
            cpu, wall = time.process_time(), time.perf_counter()
            batch = next(batches, None)
            cpu_s, wall_s = cpu_s + time.process_time() - cpu, wall_s + time.perf_counter() - wall
            if batch is None:
                break
            count(batch)
            if wall_s > self.max_s and made + 1 >= MIN_BATCHES:
                break
        return cpu_s, max(cpu_s, wall_s - (delay.read_s() - began_s))

    def profiled(self, batches: Iterator[Any], profiler: cProfile.Profile) -> dict[str, float]:
        """Return the seconds that each function took on its own while batches were made."""
        began = time.perf_counter()
        for made in itertools.count(1):
            profiler.enable()
            try:
                batch = next(batches, None)
            finally:
                profiler.disable()
            over = time.perf_counter() - began > self.max_s and made >= MIN_BATCHES
            if batch is None or over or made >= MAX_BATCHES:
                break
        own: defaultdict[str, float] = defaultdict(float)
        for entry in profiler.getstats():
            own[name_of(entry.code)] += entry.inlinetime
        costly = sorted(own, key=lambda name: -own[name])[:MAX_FUNCTIONS]
        return {name: own[name] for name in costly}

    def sent(self, batch: Any) -> float | None:
        """Return the CPU seconds of both processes for sending a batch."""
        if batch is None or not tensor_bytes(batch):
            self.missing["transport"] = "the batch holds no tensor"
            return None
        device = find_other_device(batch)
        if device:
            self.missing["transport"] = f"the batch is on {device}: no worker sends it"
            return None
        try:
            return send_cost_s(batch)
        except (OSError, RuntimeError, EOFError) as error:
            self.missing["transport"] = f"a batch could not be sent: {error}"
            return None


def is_repeated(loader: Any) -> bool | None:
    """Return whether the first samples are the same when they are made again; None for unknown.

    The random streams go on in between: a sample that draws from them is another one.
    """
    numbers = getattr(loader, "batch_sampler", None) and next(iter(loader.batch_sampler), None)
    if loader._dataset_kind != dataloader._DatasetKind.Map or not numbers:
        return None
    few = list(numbers)[:COMPARED]
    try:
        samples = ([loader.dataset[number] for number in few] for _ in range(2))
        one, two = ([_comparable(leaf) for leaf in leaves_of(each)] for each in samples)
    except Exception:  # noqa: BLE001  the user's code, in a way in which it need not be called
        return None
    return one == two


def _comparable(leaf: Any) -> Any:
    """Return what can be compared; of what is no number, text or tensor its type."""
    if isinstance(leaf, torch.Tensor):  # of any device, and of dtypes that numpy lacks
        flat = leaf.detach().cpu().reshape(-1).contiguous()
        return leaf.dtype, tuple(leaf.shape), flat.view(torch.uint8).numpy().tobytes()
    if hasattr(leaf, "__array__"):
        array = np.asarray(leaf)
        return array.dtype.str, array.shape, array.tobytes()
    return leaf if isinstance(leaf, int | float | str | bytes) else type(leaf)


def find_other_device(batch: Any) -> str:
    """Return the kind of a device other than the CPU that holds a part of a batch, or nothing."""
    kinds = (leaf.device.type for leaf in leaves_of(batch) if isinstance(leaf, torch.Tensor))
    return next((kind for kind in kinds if kind != "cpu"), "")


def name_of(code: Any) -> str:
    """Return file and function of a profiler's entry; built-in ones say it themselves."""
    return code if isinstance(code, str) else f"{code.co_filename}:{code.co_name}"


def send_cost_s(batch: Any) -> float:
    """Return the CPU seconds that one batch's way from a worker costs, in both processes.

    A worker collates into shared memory, so what it takes to copy the batch there is not counted
    twice: the time of a plain copy is taken off.
    """
    from torch import multiprocessing as mp

    context = mp.get_context("fork")
    queue: Any = context.SimpleQueue()
    ours, theirs = context.Pipe()
    sender = context.Process(target=_send, args=(batch, queue, theirs), daemon=True)
    sender.start()
    # The sender's end alone keeps the pipe open now: reading from it ends when the sender does.
    queue._writer.close()
    try:
        received_s = 0.0
        for number in range(SENT):
            if not queue._reader.poll(WAIT_S):
                raise RuntimeError("the sending process did not answer")
            began = time.process_time()
            got = queue.get()
            map_leaves(got, _touch)
            received_s += (time.process_time() - began) * (number >= WARM)
        if not ours.poll(WAIT_S):
            raise RuntimeError("the sending process did not answer")
        sent_s = float(ours.recv())
        ours.send("received")
    finally:
        sender.join(2.0)
        sender.kill()
    return max(0.0, received_s + sent_s) / (SENT - WARM)


def _send(batch: Any, queue: Any, pipe: Any) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    sent_s = copied_s = 0.0
    for number in range(SENT):
        began = time.process_time()
        fresh = map_leaves(batch, _copy)
        copied = time.process_time()
        queue.put(fresh)
        if number >= WARM:
            copied_s += copied - began
            sent_s += time.process_time() - copied
    pipe.send(sent_s - copied_s)
    pipe.poll(WAIT_S)
    os.kill(os.getpid(), 9)  # no exit handler of the script's runs here


def _copy(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, torch.Tensor) else leaf


def _touch(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor) and leaf.numel():
        leaf.reshape(-1)[::1024].sum()
    return leaf
