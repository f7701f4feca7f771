"""A TrialResult: what a training process knows at its end, and hands its parent.

`flatout.agent.recorder` writes it as JSON, `flatout.launch.trial_process` reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flatout.records.profile import ModelFacts, OptimizerFacts, PeakBytes
from flatout.records.readings import TraceSummary


@dataclass(slots=True)
class Segment:
    """Everything between two outermost optimizer steps (of whichever optimizer)."""

    who: int = -1
    """Which optimizer ended it, by order of construction; -1 where backward did (none exists)."""
    seconds: list[float] = field(default_factory=list)
    """By phase, as `flatout.records.phase_clock.NAMES`."""
    end: float = 0.0
    is_sampled: bool = True
    """False for a skipped step: its length and batches are known, its phases are not."""
    batches: int = 0
    samples: int = 0
    batch_bytes: int = 0
    forwards: int = 0
    calls: list[int] = field(default_factory=list)
    """Forwards of each root, by order of discovery; shorter where later roots were not called."""
    backwards: int = 0
    closures: int = 0
    """How often the optimizer called its closure: each time but the first the samples are the
    same, at other parameters."""
    evals: int = 0
    loader_starts: int = 0
    communication: list[float] = field(default_factory=list)
    """Seconds in collectives by the phase they were called in; empty where there were none."""
    losses: list[Any] = field(default_factory=list)
    """Floats; on a device detached tensors until the run ends: reading one would synchronise."""


@dataclass(slots=True)
class LoaderSeen:
    """One construction site of a `DataLoader`."""

    address: str
    asked: dict[str, Any]
    """The arguments as the script gave them."""
    is_training: bool = False
    batches: int = 0
    epochs: int = 0
    batch_bytes: list[int] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    """Of each epoch: the time to make the iterator and to draw the first batch."""
    ends_s: list[float] = field(default_factory=list)
    """Of each epoch: the time to learn that no batch is left, in which workers are ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which of several processes this one is."""

    rank: int
    world_size: int = 1
    backend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen:
    """The training's device, and what a trace of its kernels showed."""

    kind: str
    peak: PeakBytes = PeakBytes()
    name: str | None = None
    uuid: str = ""
    busy_share: float | None = None
    h2d_s_per_segment: float = 0.0
    trace: TraceSummary | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Everything that one training process knows at its end, or knew when it was killed."""

    why: str = "done"
    """Why it ended: `done`, `refused`, `killed` (this is what it had noted), `ended`."""
    segments: tuple[Segment, ...] = ()
    period: int = 1
    """Workers behind the training batches, at least 1."""
    device: DeviceSeen = DeviceSeen(kind="cpu")
    ranks: RankPlace | None = None
    """None for a training of one process."""
    crash: str = ""
    crash_trace: str = ""
    crashed_at: float = 0.0
    models: tuple[ModelFacts, ...] = ()
    optimizers: tuple[OptimizerFacts, ...] = ()
    loaders: tuple[LoaderSeen, ...] = ()
    status: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Of each technique what became of it, and why."""
    errors: tuple[str, ...] = ()
    trains_elsewhere: bool = False
    trains_unseen: bool = False
    collection_s: float = 0.0
    """Seconds in Python's garbage collection."""
    load: Mapping[str, float] = field(default_factory=dict)
    listening_s_per_step: float = 0.0
    marking_s: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    """By probe what it saw, in its own words."""
