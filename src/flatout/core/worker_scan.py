"""What a scan of loader workers found: the training's pace with each number of them."""

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

AS_GOOD = 1.03
"""Fewer workers whose batch takes so much longer are as good: one visit repeats to about this."""
CLEARLY = 1.05
"""What fewer threads beside the workers must add to be worth a second lever."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPace:
    """The running training with one number of workers."""

    num_workers: int
    prefetch_factor: int
    """Batches each worker held ready; 0 without workers."""
    batch_ms: tuple[float, ...]
    """Time from one batch to the next, of each visit: loading and training together."""
    start_ms: float = 0.0
    """Until the first batch came."""
    threads: int = 0
    """Threads of the training's operations; 0 where they were left as they are."""

    @property
    def mean_ms(self) -> float:
        """The pace over the visits."""
        return statistics.geometric_mean(self.batch_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerScan:
    """The paces of one process in which the number of workers was changed on the way."""

    now: int
    """Workers that the script, or the recipe so far, has."""
    paces: tuple[WorkerPace, ...]
    epoch_batches: int | None = None
    """Batches after which workers are started anew; None where they live on."""
    stopped: str = ""
    """Why larger numbers were not visited; empty where all were."""
    with_threads: tuple[WorkerPace, ...] = ()
    """On a CPU: workers for which the training's operations were left fewer threads."""

    @property
    def best(self) -> WorkerPace:
        """The fewest workers that are as good as the fastest."""
        return min(self._as_good(self.paces), key=lambda pace: pace.num_workers)

    @property
    def best_pair(self) -> WorkerPace | None:
        """The workers that are best with fewer threads beside them; None where that adds little.

        Of as good ones the most: the cores are short, and levers that make the computation shorter
        will leave more of them to the workers.
        """
        if not self.with_threads:
            return None
        pair = max(self._as_good(self.with_threads), key=lambda pace: pace.num_workers)
        return pair if self.whole_ms(pair) * CLEARLY < self.whole_ms(self.best) else None

    def _as_good(self, paces: tuple[WorkerPace, ...]) -> list[WorkerPace]:
        fastest = min(self.whole_ms(pace) for pace in paces)
        return [pace for pace in paces if self.whole_ms(pace) <= AS_GOOD * fastest]

    def whole_ms(self, pace: WorkerPace) -> float:
        """Return the time of one batch with its part of an epoch's start."""
        if self.epoch_batches is None:
            return pace.mean_ms
        return pace.mean_ms + max(0.0, pace.start_ms - pace.mean_ms) / max(1, self.epoch_batches)

    def ratio(self, num_workers: int, *, than: int) -> float:
        """Return how many times as fast one number of workers is as another; NaN where unseen."""
        seen = {pace.num_workers: self.whole_ms(pace) for pace in self.paces}
        return seen.get(than, math.nan) / seen.get(num_workers, math.nan)

    def gain(self, pace: WorkerPace) -> float:
        """Return how many times as fast as now a visited pace is; NaN where now was not seen."""
        seen = [self.whole_ms(x) for x in self.paces if x.num_workers == self.now]
        return (seen[0] if seen else math.nan) / self.whole_ms(pace)


def worker_scan_from_json(plain: Mapping[str, Any]) -> WorkerScan:
    """Return the scan that `dataclasses.asdict` wrote."""
    paces, with_threads = (_paces(plain.get(name, ())) for name in ("paces", "with_threads"))
    return WorkerScan(**{**plain, "paces": paces, "with_threads": with_threads})


def _paces(plain: Iterable[Mapping[str, Any]]) -> tuple[WorkerPace, ...]:
    return tuple(WorkerPace(**{**item, "batch_ms": tuple(item["batch_ms"])}) for item in plain)
