"""A TrialResult: what a training process knows at its end, and hands its parent.

`flatout.agent.recorder` writes it as JSON, `flatout.launch.trial_process` reads it. A real training
(`flatout run --record`) leaves a `RunRecord` instead: its loss over time, and what it printed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatout.records.json_records import from_plain, to_plain
from flatout.records.profile import ModelFacts, OptimizerFacts, PeakBytes
from flatout.records.readings import CompileFacts, TraceSummary

RUN_SCHEMA = "flatout.run/1"
CURVE, PRINTED = "curve", "printed"
"""Names of the training process's notes in the job's folder."""
LOWER_IS_BETTER = (
    *("loss", "error", "err", "perplexity", "ppl", "nll", "mse", "mae", "rmse", "wer", "cer"),
    *("fid", "bpb", "bpc"),
)
HIGHER_IS_BETTER = (
    *("accuracy", "acc", "f1", "auc", "bleu", "rouge", "psnr", "ssim", "iou", "map", "dice"),
    *("score", "reward", "elbo", "precision", "recall"),
)
"""Words in a name that make a printed number a metric; those above are better when lower."""


@dataclass(slots=True)
class Segment:
    """Everything between two outermost optimizer steps (of whichever optimizer)."""

    who: int = -1
    """Optimizer that ended it, in order of construction; -1 where backward did."""
    seconds: list[float] = field(default_factory=list)
    """By phase, as `flatout.records.phase_clock.NAMES`."""
    end: float = 0.0
    is_sampled: bool = True
    """False for a skipped step: its length and batches are known, its phases are not."""
    batches: int = 0
    samples: int = 0
    called: int = 0
    """Samples that the first root was called with before any batch was drawn."""
    called_most: int = 0
    """Those of the largest of these calls."""
    calls: list[int] = field(default_factory=list)
    """Forwards of each root, by order of discovery; shorter where later roots were not called."""
    backwards: int = 0
    closures: int = 0
    """Calls of the closure by the optimizer: after the first the samples are the same ones."""
    evals: int = 0
    """Calls of the roots, their parts and their copies that train nothing."""
    loader_starts: int = 0
    communication: list[float] = field(default_factory=list)
    """Seconds in collectives by the phase they were called in; empty where there were none."""
    losses: list[Any] = field(default_factory=list)
    """Floats; on a device detached tensors until the run ends: reading one would synchronise."""

    @property
    def called_with(self) -> int:
        """Return how many samples the first root was given.

        Of several calls and one backward, each has the same ones, as two views and steps in time,
        or fewer: a policy also acts with gradients on, for one state at a time.
        """
        calls = self.calls[0] if self.calls else 0
        if not 0 < self.backwards < calls:
            return self.called
        return min(self.called, self.called_most * self.backwards)


@dataclass(slots=True)
class LoaderSeen:
    """One construction site of a `DataLoader`."""

    address: str
    asked: dict[str, Any]
    """The arguments as the script gave them."""
    is_training: bool = False
    builds: int = 1
    batches: int = 0
    epochs: int = 0
    begun_at: list[int] = field(default_factory=list)
    """Batches that it had given when each epoch began."""
    batch_bytes: list[int] = field(default_factory=list)
    starts_s: list[float] = field(default_factory=list)
    """Of each epoch: the time to make the iterator and to draw the first batch."""
    ends_s: list[float] = field(default_factory=list)
    """Of each epoch: the time to learn that no batch is left, in which workers are ended."""
    first_batch: str = ""
    epoch_samples: list[list[int]] = field(default_factory=list)
    """Both as in `LoaderFacts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which of several processes this one is."""

    rank: int
    world_size: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSeen:
    """The training's device, and what a trace of its kernels showed."""

    kind: str
    count: int = 1
    """Devices that hold its parameters; name and number are those of the first."""
    peak: PeakBytes = PeakBytes()
    """Of the one that reserved most."""
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
    draws_elsewhere: bool = False
    trains_unseen: bool = False
    collection_s: float = 0.0
    compiling: CompileFacts | None = None
    load: Mapping[str, float] = field(default_factory=dict)
    listening_s_per_step: float = 0.0
    marking_s: float = 0.0
    environment: Mapping[str, Any] = field(default_factory=dict)
    probes: Mapping[str, Any] = field(default_factory=dict)
    """By probe what it saw, in its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """The training at one moment."""

    step: int
    s: float
    """Seconds since the first point."""
    samples: int
    loss: float | None = None
    """Of the latest backward that could be read without waiting for the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrintedValue:
    """A metric as the script printed it."""

    step: int
    s: float
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One real training, as its first rank saw it."""

    command: str
    recipe: str
    """The recipe in one line."""
    exit_code: int
    seconds: float
    """From the start of the script's process to its end."""
    points: tuple[CurvePoint, ...] = ()
    printed: Mapping[str, tuple[PrintedValue, ...]] = field(default_factory=dict)
    """By the metric's name."""

    def to_json(self) -> dict[str, Any]:
        """Return the `flatout.run/1` mapping."""
        return {"schema": RUN_SCHEMA} | to_plain(self)

    @property
    def ms_per_step(self) -> float | None:
        """Milliseconds a step between the first and the last point; None with fewer than two."""
        if len(self.points) < 2 or self.points[-1].step <= self.points[0].step:
            return None
        first, last = self.points[0], self.points[-1]
        return 1000 * (last.s - first.s) / (last.step - first.step)


def run_record_from_json(plain: Mapping[str, Any]) -> RunRecord:
    """Return the record that `to_json` wrote."""
    return from_plain(RunRecord, plain)


def is_lower_better(name: str) -> bool:
    """Return whether a metric of this name is better when it is lower.

    >>> is_lower_better("val_loss"), is_lower_better("val accuracy")
    (True, False)
    """
    parts = name.replace("_", " ").replace("/", " ").replace("@", " ").split()
    return any(part in LOWER_IS_BETTER for part in parts)


def seconds_until(values: Sequence[PrintedValue], target: float, *, lower: bool) -> float | None:
    """Return when a metric first was as good as a target; None where it never was."""
    for value in values:
        if (value.value <= target) if lower else (value.value >= target):
            return value.s
    return None
