"""The journey of a batch: what each leg of its way costs, from the disk to the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TRAINING = "training"
WORKERS = "workers"


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


def journey_from_json(plain: Mapping[str, Any]) -> Journey:
    """Return the journey that `dataclasses.asdict` wrote."""
    return Journey(
        legs=tuple(Leg(**item) for item in plain["legs"]),
        workers=tuple(WorkerFacts(**item) for item in plain["workers"]),
        missing=plain["missing"],
    )
