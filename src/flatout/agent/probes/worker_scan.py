"""Change the number of loader workers while the training runs, and note its pace with each.

Workers take cores from the training and give it batches: which number is best shows only with both
under way. In one process, because equal processes differ by more than two numbers of workers do.
Order and random streams are not the script's: nothing but the pace is taken from this run.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from flatout.agent import patching
from flatout.agent.hooks.loader import ADDRESS
from flatout.agent.measuring.batch_making import dataloader
from flatout.agent.session import Session
from flatout.agent.worker_start import start_of
from flatout.analysis.worker_log import read_pss
from flatout.records.errors import NotApplicable

LEAST_S = 2.0
"""Time on one number once its workers are under way; with 1.2 s visits differed by 2 to 15 %."""
LEAST_BATCHES = 8
MOST_S = 6.0
"""The same for slow steps: then what there is must do."""
PROGRESS = 1.03
"""A number of workers that is not so much faster than the best before it is no progress."""
PATIENCE = 2
"""Numbers without progress after which larger ones are not visited, where a device trains."""
CONTENDERS = 1.15
"""Numbers within this of the best are visited again, each time in the opposite order: what drifts
cancels."""
ROUNDS = 3
"""Visits of these."""


def start(session: Session, options: Mapping[str, Any]) -> "Scan":
    """Scan the loader at `options["address"]`.

    `options["visits"]` has workers, `prefetch_factor` and the training's threads (0: as they are)
    in the order of the visits, the present number first. `options["max_s"]` bounds the whole,
    `options["room_bytes"]` the workers' memory. `options["visits_all"]` goes on where more workers
    bring nothing: threads of a training on the CPU that spin hide the gain of many workers behind
    the loss of a few. `options["whole_epochs"]` makes each visit one epoch, the start and the end
    of its workers included: short epochs are mostly that.
    """
    scan = Scan(session, options)
    scan.install()
    return scan


@dataclass(slots=True)
class Visit:
    """One number of workers, for a while."""

    workers: int
    prefetch: int
    began: float
    threads: int = 0
    """Threads of the training's operations; 0 for as many as the script has."""
    start_s: float = 0.0
    last: float | None = None
    """When the batch before came; None where time since then is not the training's."""
    lead: int = 0
    """Batches still to come that were begun before the training took its share of the cores."""
    batches: int = 0
    seconds: float = 0.0

    @property
    def setting(self) -> tuple[int, int, int]:
        """What was visited: workers, `prefetch_factor`, threads."""
        return self.workers, self.prefetch, self.threads

    @property
    def batch_s(self) -> float:
        """The pace."""
        return self.seconds / self.batches

    @property
    def is_known(self) -> bool:
        """Whether workers made two rounds of batches.

        Those begun before the training took its share came at twice the pace that they kept.
        """
        return self.batches >= (2 * self.workers if self.workers > 1 else 1)

    def saw(self, moment: float) -> None:
        """Count a batch that came at a moment."""
        if not self.start_s:
            self.start_s = moment - self.began
            self.lead = max(1, self.workers)
        if self.last is not None and not self.lead:
            self.batches += 1
            self.seconds += moment - self.last
        self.lead = max(0, self.lead - 1)
        self.last = moment

    def interrupt(self) -> None:
        """Leave out the time until the next batch: an epoch ended, and workers ran ahead."""
        self.last = None
        self.lead = max(1, self.workers)

    def is_over(self, moment: float) -> bool:
        """Return whether the pace is known, in whole rounds of workers that deliver at once."""
        if moment - self.began > MOST_S + self.start_s:
            return True
        is_round = self.batches % max(1, self.workers) == 0
        enough = max(LEAST_BATCHES, 2 * self.workers)
        return is_round and self.batches >= enough and self.seconds >= LEAST_S


@dataclass(slots=True)
class Scan:
    """The visits of one loader, and the iterator behind the one that is under way."""

    session: Session
    options: Mapping[str, Any]
    visits: list[Visit] = field(default_factory=list)
    is_over: bool = False
    stopped: str = ""
    ahead: list[tuple[int, int, int]] = field(default_factory=list)
    """Workers, `prefetch_factor` and threads still to visit."""
    threads: int = 0
    """The script's own, while a visit has others."""
    rounds: int = 1
    loader: Any = None
    context: Any = None
    """How the workers start: as those that the technique would bring in."""
    inner: Any = None
    make: Callable[[Any], Any] = lambda _: None
    began: float | None = None
    pss_bytes: float = 0.0
    """Memory of one worker, on average, when last looked at."""
    epoch_batches: int | None = None
    """Batches after which the loader starts its workers again; None where they live on."""

    def install(self) -> None:
        """Stand in where torch makes an iterator: what the hook points put around it stays."""
        self.ahead = [(int(n), int(pre), int(t)) for n, pre, t in self.options["visits"]]
        patching.wrap(dataloader.DataLoader, "_get_iterator", self.scanning)

    def scanning(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the making of an iterator, of which one scans."""
        self.make = make

        @functools.wraps(make)
        def make_scanning(loader: Any) -> Any:
            if loader.__dict__.get(ADDRESS) != self.options["address"]:
                return make(loader)
            return self.begin(loader) if self.session.is_mine() else make(loader)

        return make_scanning

    def begin(self, loader: Any) -> Any:
        """Return an iterator of one epoch that draws from the visit under way."""
        if self.loader is not loader:
            try:
                self.loader, self.context = loader, start_of(loader)
            except NotApplicable as reason:
                return self._give_up(loader, str(reason))
        if self.options["whole_epochs"]:
            self._begin_epoch()
        else:
            self.epoch_batches = None if loader.persistent_workers else len(loader)
        if self.visits:
            self.visits[-1].interrupt()
        return _scanning_class()(loader, self)

    def _give_up(self, loader: Any, reason: str) -> Any:
        """End the scan of a loader that can have no workers."""
        self.loader, self.stopped = None, reason
        self.session.fire("enough")
        return self.make(loader)

    def draw(self) -> Any:
        """Return the next batch of the visit under way; the last one goes on until the run ends."""
        now = self.session.clock.now
        if self.began is None:
            self.began = now()
        if self.options["whole_epochs"]:
            self._end_late(now())
            return self.inner._next_data()
        if self.inner is None:
            self._next_visit()
        try:
            batch = self.inner._next_data()
        except StopIteration:
            self._make_inner()
            self.visits[-1].interrupt()
            batch = self.inner._next_data()
        visit, moment = self.visits[-1], now()
        visit.saw(moment)
        if not self.is_over and visit.is_over(moment):
            self._end_visit(moment)
        return batch

    def end_epoch(self, batches: int) -> None:
        """End the workers as the script's loader does; the epoch was a visit, if visits are."""
        if not self.options["whole_epochs"]:
            return
        self._look_at_memory()
        self._close()
        if self.is_over:
            return
        visit, moment = self.visits[-1], self.session.clock.now()
        visit.batches, visit.seconds = batches, moment - visit.began
        self._end_visit(moment)

    def _begin_epoch(self) -> None:
        if self.began is None:
            self.began = self.session.clock.now()
        if self.is_over:
            self._make_inner()
        else:
            self._next_visit()

    def _end_late(self, moment: float) -> None:
        """End the scan of a script that leaves its epochs before their end."""
        if not self.is_over and self._is_late(moment - MOST_S):
            self.is_over = True
            self.session.fire("enough")

    def result(self) -> Mapping[str, Any]:
        """Return the pace of every visit that showed one."""
        seen = [visit for visit in self.visits if visit.is_known]
        return {
            "visits": [
                {
                    "num_workers": visit.workers,
                    "prefetch_factor": visit.prefetch,
                    "threads": visit.threads,
                    "batch_ms": 1e3 * visit.batch_s,
                    "start_ms": 1e3 * visit.start_s,
                    "batches": visit.batches,
                }
                for visit in seen
            ],
            "epoch_batches": self.epoch_batches,
            "stopped": self.stopped,
            "unvisited": self._unvisited(),
        }

    def _unvisited(self) -> list[tuple[int, int, int]]:
        """Return what the script ended before: it was neither seen nor left out."""
        if self.is_over or self.rounds > 1:
            return []
        return [visit.setting for visit in self.visits if not visit.is_known] + self.ahead

    def _next_visit(self) -> None:
        workers, prefetch, threads = self.ahead.pop(0)
        before = self.visits[-1].threads if self.visits else 0
        if not before:
            self.threads = torch.get_num_threads()
        if threads != before:
            torch.set_num_threads(threads or self.threads)
        self.visits.append(Visit(workers, prefetch, self.session.clock.now(), threads))
        self._make_inner()

    def _make_inner(self) -> None:
        visit = self.visits[-1]
        self._close()
        with warnings.catch_warnings():
            # Torch warns of more workers than cores: that is what is being tried.
            warnings.simplefilter("ignore")
            changed = with_workers(self.loader, visit.workers, visit.prefetch)
            if visit.workers:
                changed.multiprocessing_context = self.context
            self.inner = self.make(changed)

    def _end_visit(self, moment: float) -> None:
        if not self.options["whole_epochs"]:
            self._look_at_memory()
        self._look_ahead(moment)
        if not self.ahead and self.rounds < ROUNDS:
            self.rounds += 1
            self.ahead = again(self.visits) if self.rounds == 2 else turned(self.visits)
        if self.ahead and not self._is_late(moment):
            self._close()
            self.inner = None
            return
        self.is_over = True
        self.session.fire("enough")

    def _look_ahead(self, moment: float) -> None:
        """Leave out numbers that promise nothing, or for which there is no memory."""
        if self.rounds > 1 or not self.ahead:
            return
        if self._is_late(moment):
            self.stopped, self.ahead = "the time for the scan was over", []
        elif not self.options["visits_all"] and is_stuck(self.visits):
            self.stopped, self.ahead = "more workers were no faster", []
        elif self.ahead[0][0] * self.pss_bytes > self.options["room_bytes"]:
            self.stopped = "more workers would take too much memory"
            most = self.options["room_bytes"] / self.pss_bytes
            self.ahead = [visit for visit in self.ahead if visit[0] <= most]

    def _is_late(self, moment: float) -> bool:
        return self.began is not None and moment - self.began > self.options["max_s"]

    def _look_at_memory(self) -> None:
        running = getattr(self.inner, "_workers", ())
        sizes = [max(0.0, read_pss(Path("/proc") / str(worker.pid))) for worker in running]
        if sizes:
            self.pss_bytes = sum(sizes) / len(sizes)

    def _close(self) -> None:
        """End the workers of the visit before; they would take cores from the next."""
        shut_down = getattr(self.inner, "_shutdown_workers", None)
        if shut_down is not None:
            shut_down()


def with_workers(loader: Any, workers: int, prefetch: int) -> Any:
    """Return a copy of a loader with another number of workers; data and sampler are shared."""
    changed = copy.copy(loader)
    # Not by attribute: torch guards some of these once a loader is built.
    changed.__dict__.update(
        num_workers=workers,
        prefetch_factor=prefetch if workers else None,
        persistent_workers=False,
        _iterator=None,
    )
    if not workers:
        changed.__dict__["timeout"] = 0
    return changed


def is_stuck(visits: Sequence[Visit]) -> bool:
    """Return whether the latest visits brought no progress."""
    paces = [visit.batch_s for visit in visits if visit.is_known]
    if len(paces) <= PATIENCE:
        return False
    best = min(paces[:-PATIENCE])
    return all(pace * PROGRESS > best for pace in paces[-PATIENCE:])


def again(visits: Sequence[Visit]) -> list[tuple[int, int, int]]:
    """Return the numbers to visit a second time: the best and the present one, the latest first."""
    seen = [visit for visit in visits if visit.is_known]
    if len(seen) < 2:
        return []
    best = min(visit.batch_s for visit in seen)
    near = [x for x in seen if x is seen[0] or x.batch_s <= CONTENDERS * best]
    return [visit.setting for visit in reversed(near)]


def turned(visits: Sequence[Visit]) -> list[tuple[int, int, int]]:
    """Return the numbers of the second round in the opposite order."""
    numbers = [visit.setting for visit in reversed(visits)]
    first = [number for place, number in enumerate(numbers) if number not in numbers[:place]]
    return [number for number in first if numbers.count(number) > 1]


@functools.cache
def _scanning_class() -> Any:
    """Return the iterator's class; its base is whatever this torch has."""
    base: Any = dataloader._BaseDataLoaderIter

    class Scanning(base):  # type: ignore[misc]
        """Draws from the scan for as many batches as an epoch of the loader has."""

        def __init__(self, loader: Any, scan: Scan) -> None:
            super().__init__(loader)
            self.scan, self.length = scan, len(loader)

        def _next_data(self) -> Any:
            if self._num_yielded >= self.length:
                self.scan.end_epoch(self.length)
                raise StopIteration
            return self.scan.draw()

    return Scanning
