"""What a scan of loader workers found: the training's pace with each number of them."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

AS_GOOD = 1.03
"""Fewer workers whose batch takes so much longer are as good: one visit repeats to about this."""


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

    @property
    def best(self) -> WorkerPace:
        """The fewest workers that are as good as the fastest."""
        fastest = min(self.whole_ms(pace) for pace in self.paces)
        good = [pace for pace in self.paces if self.whole_ms(pace) <= AS_GOOD * fastest]
        return min(good, key=lambda pace: pace.num_workers)

    def whole_ms(self, pace: WorkerPace) -> float:
        """Return the time of one batch with its part of an epoch's start."""
        if self.epoch_batches is None:
            return pace.mean_ms
        return pace.mean_ms + max(0.0, pace.start_ms - pace.mean_ms) / max(1, self.epoch_batches)

    def ratio(self, num_workers: int, *, than: int) -> float:
        """Return how many times as fast one number of workers is as another; NaN where unseen."""
        seen = {pace.num_workers: self.whole_ms(pace) for pace in self.paces}
        return seen.get(than, math.nan) / seen.get(num_workers, math.nan)


def worker_scan_from_json(plain: Mapping[str, Any]) -> WorkerScan:
    """Return the scan that `dataclasses.asdict` wrote."""
    paces = tuple(
        WorkerPace(**item | {"batch_ms": tuple(item["batch_ms"])}) for item in plain["paces"]
    )
    return WorkerScan(**{**plain, "paces": paces})
