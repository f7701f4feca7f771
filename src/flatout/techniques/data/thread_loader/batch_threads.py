"""Make the samples of a batch in threads of one process, each with random streams of its own.

A sample's streams are seeded from the batch and its place in it, so that what is drawn does not
depend on which thread came first. Python's `random` and numpy's `numpy.random` are given to each
thread again; torch's stream and generators that a data set keeps cannot be shared like that.
"""

import contextlib
import functools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils import fetch as fetching

from flatout.agent import patching
from flatout.data.byte_batches.lookup_tracing import follow_too, is_following
from flatout.data.proof.agreement import find_collation

SEED_BITS = 60
"""Drawn once for each batch: the samples' streams are numbered from there."""
MAX_DEPTH = 2
"""Attributes of a data set that are looked into for what threads cannot share."""
NUMPY_FUNCTIONS = {"seed": "seed", "sample": "random_sample", "ranf": "random_sample"}
"""Functions of `numpy.random` that are no methods of its hidden generator, and what they call."""
GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


class Own(threading.local):
    """The random streams of one thread; none in threads that make no samples."""

    python: random.Random | None = None
    numpy: np.random.RandomState | None = None


OWN = Own()


class ThreadedCollate:
    """The script's own collation, of a loader whose samples are made in threads."""

    def __init__(self, collate: Callable[[Any], Any], threads: int) -> None:
        self.collate = collate
        self.threads = threads
        self.__wrapped__ = collate
        self.pool: ThreadPoolExecutor | None = None
        self.owner = 0
        install()

    def __call__(self, samples: Any) -> Any:
        """Collate."""
        return self.collate(samples)

    def __reduce__(self) -> Any:
        return ThreadedCollate, (self.collate, self.threads)

    def find_pool(self) -> ThreadPoolExecutor:
        """Return this process's threads; a forked worker starts its own."""
        if self.pool is None or self.owner != os.getpid():
            self.owner = os.getpid()
            self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="flatout-samples")
        return self.pool


class _Threaded:
    """A data set whose samples are made side by side."""

    def __init__(self, dataset: Any, pool: ThreadPoolExecutor) -> None:
        self.dataset = dataset
        self.pool = pool

    def __getitem__(self, index: Any) -> Any:
        return self.dataset[index]

    def __getitems__(self, indices: Sequence[Any]) -> list[Any]:
        """Make the samples, each from streams of its own."""
        start = random.getrandbits(SEED_BITS)
        numbers = iter(range(start, start + len(indices)))
        return self._flatout_each(
            indices, [functools.partial(seed_own, number) for number in numbers]
        )

    def _flatout_each(
        self, indices: Sequence[Any], before: Sequence[Callable[[], None]]
    ) -> list[Any]:
        """Make the samples; `before` sets the streams for each. The guard seeds them here."""
        follows = is_following()

        def make(index: Any, prepare: Callable[[], None]) -> Any:
            with own_streams(), follow_too() if follows else contextlib.nullcontext():
                prepare()
                return self.dataset[index]

        begun = [self.pool.submit(make, *one) for one in zip(indices, before, strict=True)]
        wait(begun)  # after an error none may go on drawing where streams are no more its own
        return [sample.result() for sample in begun]


@functools.cache
def install() -> None:
    """Make torch's fetcher use the threads of loaders that collate with `ThreadedCollate`."""
    order = patching.Order.TECHNIQUE
    patching.wrap(fetching._MapDatasetFetcher, "fetch", _threaded, order=order)


def _threaded(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def fetch(fetcher: Any, indices: Any) -> Any:
        plan = find_threads(fetcher.collate_fn)
        if plan is None or not fetcher.auto_collation or isinstance(fetcher.dataset, _Threaded):
            return original(fetcher, indices)
        dataset = fetcher.dataset
        fetcher.dataset = _Threaded(dataset, plan.find_pool())
        try:
            with streams_per_thread():
                return original(fetcher, indices)
        finally:
            fetcher.dataset = dataset

    return fetch


def find_threads(collate: Any) -> ThreadedCollate | None:
    """Return the collation that asks for threads, under what others wrapped around it."""
    return find_collation(collate, ThreadedCollate)


@contextmanager
def own_streams() -> Iterator[None]:
    """Give the running thread random streams of its own."""
    OWN.python, OWN.numpy = random.Random(0), None
    try:
        yield
    finally:
        OWN.python, OWN.numpy = None, None


def seed_own(number: int) -> None:
    """Seed the running thread's streams."""
    random.seed(number)
    np.random.seed(number % 2**32)


@contextmanager
def streams_per_thread() -> Iterator[None]:
    """Let the functions of `random` and `numpy.random` use the running thread's own streams."""
    replaced = [(random, name) for name in _bound_to(random, _python())]
    replaced += [(np.random, name) for name in (*_bound_to(np.random, _numpy()), *NUMPY_FUNCTIONS)]
    with contextlib.ExitStack() as stack:
        for module, name in replaced:
            method = NUMPY_FUNCTIONS.get(name, name) if module is np.random else name
            dispatched = functools.partial(_dispatch, method, is_python=module is random)
            stack.enter_context(patching.wrap(module, name, dispatched))
        yield


def _bound_to(module: Any, owner: Any) -> list[str]:
    """Return the names of a module's functions that are methods of its one hidden generator."""
    found = ((name, value) for name, value in vars(module).items() if callable(value))
    return [name for name, value in found if getattr(value, "__self__", 0) is owner]


def _dispatch(name: str, original: Callable[..., Any], *, is_python: bool) -> Callable[..., Any]:
    @functools.wraps(original)
    def draw(*args: Any, **kwargs: Any) -> Any:
        if OWN.python is None:
            return original(*args, **kwargs)
        if is_python:
            return getattr(OWN.python, name)(*args, **kwargs)
        if OWN.numpy is None:
            OWN.numpy = np.random.RandomState(0)
        return getattr(OWN.numpy, name)(*args, **kwargs)

    return draw


def _python() -> Any:
    return vars(random)["_inst"]


def _numpy() -> Any:
    return vars(np.random)["mtrand"]._rand


class SharedStreams:
    """Where the streams stood that threads share and samples must not move."""

    def __init__(self) -> None:
        self.torch = torch.default_generator.get_state()
        self.numpy = _numpy().get_state()
        self.python = random.Random(0)
        self.python.setstate(_python().getstate())

    def find_moved(self) -> str:
        """Return what was drawn from since, but for the one number of a batch, or nothing."""
        self.python.getrandbits(SEED_BITS)
        numpy = _numpy().get_state()
        if not torch.equal(self.torch, torch.default_generator.get_state()):
            return "torch's random stream, which threads share"
        if numpy[2] != self.numpy[2] or numpy[1].tobytes() != self.numpy[1].tobytes():
            return "numpy's random stream by names of its own, which threads share"
        if self.python.getstate() != _python().getstate():
            return "Python's random stream by names of its own, which threads share"
        return ""


def times_faster(one: Callable[[], Any], other: Callable[[], Any], *, rounds: int) -> float:
    """Return how many times faster the other is by the best of so many rounds of each, in turns.

    The best, because other work on the machine only ever makes things slower.
    """
    best = [float("inf"), float("inf")]
    for _ in range(rounds):
        for place, work in enumerate((one, other)):
            began = time.perf_counter()
            work()
            best[place] = min(best[place], time.perf_counter() - began)
    return best[0] / best[1]


def find_unshareable(dataset: Any) -> str:
    """Return why several threads must not ask a data set at the same time, or an empty text."""
    if getattr(dataset, "__getitems__", None) is not None:
        return "the data set makes whole batches itself (__getitems__)"
    return _unshareable(dataset, type(dataset).__name__, 0)


def _unshareable(thing: Any, path: str, depth: int) -> str:
    for name, value in getattr(thing, "__dict__", {}).items():
        place = f"{path}.{name}"
        if isinstance(value, GENERATORS):
            return f"{place} is a random generator, whose draws threads would take in any order"
        if hasattr(value, "read") and hasattr(value, "seek"):
            return f"{place} is an open file, whose position threads would share"
        if depth < MAX_DEPTH and hasattr(value, "__dict__") and not isinstance(value, type):
            found = _unshareable(value, place, depth + 1)
            if found:
                return found
    return ""
