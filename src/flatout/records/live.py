"""What is going on right now: a running job, the machine's GPUs, the host, a command's progress."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.records.json_records import to_plain
from flatout.records.readings import GpuReadings

SCHEMA = "flatout.watch/1"
STARTING, TRAINING, QUIET, ENDING = "starting", "training", "quiet", "ending"
"""States of a job: no step yet; steps come; the last one is long ago; the training is over and
flatout's process still lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveTrainer:
    """One training process, by the record it wrote last: means over its last seconds."""

    pid: int
    rank: int = 0
    step: int = 0
    age_s: float = 0.0
    """Seconds since the record was written."""
    step_ms: float | None = None
    samples_per_s: float | None = None
    shares: Mapping[str, float] = field(default_factory=dict)
    """Of the step, by phase, by the host's clock."""
    loss: float | None = None
    """Of one backward, where it could be read without waiting for the device."""
    loss_step: int | None = None
    device_kind: str = "cpu"
    device_uuid: str = ""
    memory_bytes: int | None = None
    """On a GPU what tensors hold; on the CPU the resident size."""
    busy_share: float | None = None
    """Of forward, backward and optimizer on the CPU; None on a GPU, which has counters."""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """A running flatout job."""

    folder: str
    kind: str
    """`run`, or `measure` and `guard` for the trials of `measure` and `tune`."""
    workload: str
    """What the user would type after `python`."""
    pid: int
    """The flatout process that owns it."""
    elapsed_s: float
    state: str
    trainers: tuple[LiveTrainer, ...] = ()

    @property
    def samples_per_s(self) -> float | None:
        """The samples of all training processes together."""
        rates = [t.samples_per_s for t in self.trainers if t.samples_per_s is not None]
        return sum(rates) if rates else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveGpu:
    """One GPU of this machine."""

    index: int
    name: str
    readings: GpuReadings
    is_of_job: bool = False
    """Whether the job that is watched trains on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveHost:
    """The cores, the memory and the disks. What cannot be read is None, and `missing` says why."""

    cpu_share: float | None = None
    """Share of all cores' time that was spent since the look before."""
    cores: int = 0
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    disk_read_bytes_per_s: float | None = None
    disk_write_bytes_per_s: float | None = None
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveView:
    """One look at everything."""

    at: str
    """Date and time, as ISO 8601 with the zone."""
    host: LiveHost
    job: LiveJob | None = None
    gpus: tuple[LiveGpu, ...] = ()
    notes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.watch/1` mapping."""
        plain = to_plain(self)
        if self.job is not None:
            plain["job"]["samples_per_s"] = self.job.samples_per_s
        return {"schema": SCHEMA} | plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One moment of a tuning."""

    trying: str
    done_share: float
    """Share of the budget that is spent, in [0, 1]."""
    elapsed_s: float
    left_s: float
    num_runs: int = 0
    """Trials so far, those of the guard too; how many there will be is decided on the way."""
    best_ratio: float = 1.0
    """Product of the ratios of the techniques kept so far."""
    event: str = ""
    """A line worth keeping on the screen: a verdict, a repeated trial; empty for a mere tick."""


Tell = Callable[[Progress], None]
"""Called with each moment that a reader may want to see."""
