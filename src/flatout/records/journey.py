"""What each leg of a batch's way costs, from the disk to the weights.

`Journey` has all legs, `Pipeline` what each costs a sample and the cores it takes, `WorkerScan` the
training's pace with each number of workers.
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

TRAINING = "training"
WORKERS = "workers"
STAGES = (
    *("read", "decode", "tokenise", "resize", "transform", "normalise", "python"),
    *("collate", "transport", "copy"),
)
"""Legs of a sample, in the order in which it passes them; a technique names those it shortens."""
SLOW = 10.0
"""Times the median from which a sample counts as slow: sizes of pictures differ by a few times."""
AS_GOOD = 1.03
"""Fewer workers whose batch takes so much longer are as good: one visit repeats to about this."""
CLEARLY = 1.05
"""What fewer threads alongside the workers must add to be worth a second technique."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One leg of the way. Those on the training thread add up to the step."""

    name: str
    """Stable name, such as `read`, `decode`, `collate`, `queue`, `pin`, `h2d`, `forward`."""
    where: str
    """`training` for the training thread, `workers` for the loader's processes."""
    ms: float
    """Milliseconds per training step; of workers their sum, so it may exceed the step."""
    share: float
    """`ms` over the step; of workers over the step times their number."""
    per_sample_ms: float | None = None
    bytes_per_step: float | None = None
    bytes_per_s: float | None = None
    """What the leg achieved, while it ran."""
    limit_bytes_per_s: float | None = None
    """What this machine can do there, measured; None where it was not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One process that makes batches; number -1 is the training process itself."""

    number: int
    busy_share: float
    """Share of the wall time in which it was making batches."""
    user_share: float
    system_share: float
    voluntary_switches_per_s: float
    involuntary_switches_per_s: float
    storage_bytes_per_step: float | None = None
    """What storage had to deliver (/proc/PID/io read_bytes); None where that may not be read."""
    read_bytes_per_step: float | None = None
    """What it read from files, cached or not (rchar)."""
    pss_bytes: int | None = None
    growth_bytes_per_step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Journey:
    """All legs, and the processes behind them."""

    legs: tuple[Leg, ...] = ()
    workers: tuple[WorkerFacts, ...] = ()
    missing: Mapping[str, str] | None = None
    """What is not known, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One leg of a sample's way, measured alone and alongside nothing."""

    name: str
    """One of `STAGES`; `python` is the data set's own code and what is not told apart."""
    cpu_ms: float
    """CPU time of one sample on one core."""
    share: float
    """`cpu_ms` over that of all stages."""
    wait_ms: float = 0.0
    """Time blocked, which takes a worker and no core."""
    bytes: float | None = None
    """Bytes of one sample that the leg handles; None where they are not known."""
    techniques: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """All legs of one sample, and what they mean for the cores."""

    stages: tuple[Stage, ...]
    samples: int
    """Samples that were looked at."""
    cpu_ms: float
    """CPU time of one sample over all stages."""
    samples_per_s: float
    """What one device takes when data is free."""
    cores_needed: float
    """Cores that make so many samples."""
    usable_cores: float
    """Cores that there are for it: those of this process, over the ranks on the host."""
    missing: Mapping[str, str] = field(default_factory=dict)
    is_repeated: bool | None = None
    """Whether a sample is the same each time it is made; None where no one looked."""
    slow_samples: int = 0
    """Samples among those looked at that took `SLOW` times the median, each."""
    slow_share: float = 0.0
    """Their share of the time of all."""
    slowest_sample: int | None = None
    """Index of the slowest in the data set; None where samples have no number."""
    slowest_ms: float = 0.0
    median_ms: float = 0.0
    """Of one sample, waiting included."""

    @property
    def is_fed(self) -> bool:
        """Whether the cores that are there make enough samples for one device."""
        return self.cores_needed <= self.usable_cores

    def legs_of(self, technique: str) -> tuple[str, ...]:
        """Return the names of the stages that a technique takes away or makes cheaper."""
        return tuple(stage.name for stage in self.stages if technique in stage.techniques)

    def cores_without(self, technique: str) -> float:
        """Return the cores that are needed once a technique took the whole of its stages away.

        A bound: a technique that makes a stage cheaper leaves some of it.
        """
        left = sum(stage.cpu_ms for stage in self.stages if technique not in stage.techniques)
        return self.cores_needed * left / self.cpu_ms if self.cpu_ms else 0.0


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
    """Batches after which workers are started again; None where they live on."""
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
        """The workers that are best with fewer threads alongside them; None where that adds little.

        Of as good ones the most: the cores are short, and techniques that make the computation
        shorter will leave more of them to the workers.
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
