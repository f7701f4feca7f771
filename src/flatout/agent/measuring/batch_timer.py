"""Times the making of batches at torch's fetchers: `__getitem__` told apart from collate."""

import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from torch.utils.data._utils import fetch as fetching
from torch.utils.data._utils import pin_memory as pinning

from flatout.agent import patching
from flatout.agent.session import Session

FETCHERS = ("_MapDatasetFetcher", "_IterableDatasetFetcher")
"""Classes of `torch.utils.data._utils.fetch`; all loaders, with and without workers, go through
one of them. Private names: one that is not there is reported as missing."""

CLOSER_S = 0.002
"""Batches that took less are not looked at closer: asking the kernel three times what the thread
did costs some 20 us between two steps, and who blocks for less than that loses nothing."""


class BatchMeter:
    """Seconds and counts of the batches that one process made.

    The time in `__getitem__` is told apart by what the thread did: `read` is the time it was
    blocked (storage, network, a lock, a sleep), `decode` the time it ran or waited for a core.
    After a batch that took less than `CLOSER_S` the next one counts as `decode` altogether.
    """

    def __init__(self, saw: Callable[["BatchMeter", float], None]) -> None:
        self.read_s = self.decode_s = self.collate_s = 0.0
        self.batches = 0
        self.fetcher = 0
        """Identity of the fetcher at work; 0 for none. A loader inside a data set is not told
        apart from what the data set does."""
        self._saw = saw
        self._delay = CoreDelay()
        self.knows_delay = self._delay.is_known
        self._is_close = True
        self._collating: tuple[float, float] | None = None

    def fetch(self, original: Callable[..., Any], fetcher: Any, index: Any) -> Any:
        """Make one batch and time it; `saw(meter, moment)` is called after it."""
        self.fetcher, self._collating = id(fetcher), None
        on_core = self._on_core() if self._is_close else 0.0
        began = time.perf_counter()
        try:
            return original(fetcher, index)
        finally:
            ended = time.perf_counter()
            self.fetcher = 0
            self._add(began, on_core, ended)
            self._saw(self, ended)

    def _on_core(self) -> float:
        """Return the seconds that this thread ran or was ready to run."""
        return time.thread_time() + self._delay.read_s()

    def _add(self, began: float, on_core: float, ended: float) -> None:
        """Add a batch, or an attempt that found no more samples and never came to collate."""
        collated, on_core_then = self._collating or (ended, self._on_core())
        if self._collating is not None:
            self.collate_s += ended - collated
            self.batches += 1
        made_s = collated - began
        decode_s = min(on_core_then - on_core, made_s) if self._is_close else made_s
        self.decode_s += decode_s
        self.read_s += made_s - decode_s
        self._is_close = ended - began > CLOSER_S

    def begin_collate(self) -> None:
        """Note that the samples are there and are being put together."""
        self._collating = (time.perf_counter(), self._on_core() if self._is_close else 0.0)


class CoreDelay:
    """How long this thread was ready to run and no core was free, by the kernel's own count."""

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return  # a kernel without run-queue statistics

    @property
    def is_known(self) -> bool:
        """Whether the kernel tells."""
        return self._descriptor is not None

    def read_s(self) -> float:
        """Return the seconds so far; 0 where the kernel does not tell. Costs 2 us."""
        if self._descriptor is None:
            return 0.0
        try:
            # "time on a core, time waiting for one, time slices": see sched-stats.rst
            return int(os.pread(self._descriptor, 96, 0).split()[1]) / 1e9
        except (OSError, IndexError):
            return 0.0


def install(session: Session, find_meter: Callable[[], BatchMeter | None]) -> str:
    """Time every fetcher of this process and of those forked from it; return why not, or "".

    Nothing is timed in skipped steps, nor where the running process and thread have no meter.
    """
    base = getattr(fetching, "_BaseDatasetFetcher", None)
    kinds = [kind for name in FETCHERS if (kind := getattr(fetching, name, None)) is not None]
    if base is None or not kinds:
        return "this torch has no fetchers that are known here"
    running: dict[int, BatchMeter] = {}
    _time_collate(base, running)
    for kind in kinds:
        _time_fetch(kind, session, find_meter, running)
    return ""


def _time_fetch(
    kind: Any,
    session: Session,
    find_meter: Callable[[], BatchMeter | None],
    running: dict[int, BatchMeter],
) -> None:
    """Time a fetcher's batches; while one is made, `running` has its meter by the fetcher's id."""

    def timing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def fetch(fetcher: Any, index: Any) -> Any:
            meter = find_meter()
            if meter is None or meter.fetcher:
                return original(fetcher, index)
            running[id(fetcher)] = meter
            try:
                return meter.fetch(original, fetcher, index)
            finally:
                del running[id(fetcher)]

        return fetch

    patch = patching.wrap(kind, "fetch", timing)
    session.on("skipping", patch.undo)
    session.on("sampling", patch.apply)


def _time_collate(base: Any, running: dict[int, BatchMeter]) -> None:
    def timing(build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def construct(fetcher: Any, *args: Any, **kwargs: Any) -> None:
            build(fetcher, *args, **kwargs)
            collate, number = fetcher.collate_fn, id(fetcher)

            @functools.wraps(collate, updated=())
            def timed(data: Any) -> Any:
                meter = running.get(number)
                if meter is not None:
                    meter.begin_collate()
                return collate(data)

            fetcher.collate_fn = timed

        return construct

    patching.wrap(base, "__init__", timing)


def time_pinning(saw: Callable[[float], None]) -> None:
    """Time the loader's copies to pinned memory; `saw(seconds)` is called in their thread."""
    depth = threading.local()

    def timing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def pin(*args: Any, **kwargs: Any) -> Any:
            if getattr(depth, "is_inside", False):  # it calls itself for what a batch holds
                return original(*args, **kwargs)
            depth.is_inside, began = True, time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                depth.is_inside = False
                saw(time.perf_counter() - began)

        return pin

    patching.wrap(pinning, "pin_memory", timing)
