"""A Plan: predicted memory of one training step on a device that does not exist here."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from flatout.records.json_records import to_plain
from flatout.records.memory import TensorAtPeak
from flatout.records.parallel import ParallelSpec

MAX_BATCH = 1 << 20
"""No search goes beyond: what fits a million samples is not limited by memory."""


class NumberSource(Enum):
    """How a number was come by, the surest first."""

    TRACED = "traced"
    SIMULATED = "simulated"
    CALIBRATED = "calibrated"
    ASSUMED = "assumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Bytes with where the number comes from and the interval it is in."""

    bytes: int
    source: NumberSource
    low: int | None = None
    """Lower end of the interval; None where the number is exact by construction."""
    high: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestBatch:
    """The largest batch that fits; None where not even one sample does."""

    without_retries: int | None
    """The allocator never has to give memory back and ask again from step 2 on."""
    with_retries: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """One way to make it fit (or to fit more): what it saves and what it costs."""

    choices: tuple[str, ...]
    """Labels of the techniques, `technique setting=value`; empty for the script as it is."""
    peak_bytes: int
    """Reserved plus what is outside the allocator."""
    saved_bytes: int
    time_ratio: float
    """Predicted step time over that of the script as it is; 1.0 where nothing is paid."""
    fits: bool
    largest_batch: int | None = None
    why: str = ""
    source: NumberSource = NumberSource.ASSUMED
    """`traced` where the technique itself was traced, `simulated` where only the allocator differs,
    else `assumed`: a stated model changed the trace."""
    changes_training: bool = False
    """Whether another training results: other optimizer, other parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulating:
    """A global batch in equal micro-batches that fit."""

    micro_batch: int
    steps: int
    """Micro-batches of one optimizer step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedNumber:
    """A number with where it comes from."""

    value: float
    source: NumberSource


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """One way to spread the training over ranks."""

    spec: ParallelSpec
    ranks: int
    fits: bool
    why: str
    """Where its time goes; of one that is rejected, the reason."""
    step_ms: TaggedNumber | None = None
    """Of the whole global batch; None where it was rejected before it was timed."""
    peak_bytes: TaggedNumber | None = None
    """On the fullest rank."""
    shares: Mapping[str, TaggedNumber] = field(default_factory=dict)
    """Part of the step by what more ranks do not make shorter: `communication`, `bubble`,
    `data`, `starts`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelAdvice:
    """How many ranks are worth it."""

    verdict: str
    ranks: int | None
    """To train on; None where no number that was looked at suffices."""
    asked: int
    spec: ParallelSpec | None = None
    """The fastest way on so many."""
    cause: str = ""
    """Why more ranks gain little; empty where they do gain."""
    batch: int | None = None
    """Samples of a step over all ranks, which stays what the script has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a training step will need, and what would make it fit."""

    target: str
    device: str
    capacity_bytes: int
    batch: int | None
    allocated: Amount
    reserved: Amount
    used: Amount
    """Reserved and what is outside the allocator: context, NCCL."""
    components: Mapping[str, Amount]
    """At the peak: `parameters`, `gradients`, `optimizer`, `activations`, `inputs`, `buffers`,
    `temporaries`, `workspace`, `fragmentation`, `context`, `nccl`."""
    peak_phase: str
    largest: tuple[TensorAtPeak, ...] = ()
    timeline: tuple[tuple[int, int], ...] = ()
    """Event number and allocated bytes, thinned for a plot."""
    largest_batch: LargestBatch | None = None
    ladder: tuple[Rung, ...] = ()
    """The fastest that fits first."""
    formula_bytes: int | None = None
    """The classic estimate P*D_param + B*A*D_act + O*D_opt."""
    formula_missed: Mapping[str, int] = field(default_factory=dict)
    """Bytes at the peak that the classic estimate does not count, by name."""
    parts: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Allocated bytes of each component at the events of `timeline`."""
    phases: tuple[tuple[int, str, int], ...] = ()
    """From which event number on which phase of which step runs."""
    peak_step: int = 0
    retries: int = 0
    """How often a steady step has to give memory back and ask again on this device."""
    accumulating: Accumulating | None = None
    """How to keep the batch where it does not fit as a whole."""
    checked: str = ""
    """How the extrapolation to this batch was checked; empty where nothing was extrapolated."""
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] = field(default_factory=dict)
    parallel: tuple[ParallelPlan, ...] = ()
    """Ways to spread it over the asked GPUs, the fastest that fits first, rejected ones last."""
    advice: ParallelAdvice | None = None
    """How many GPUs are worth it; None where one was asked for."""

    @property
    def fits(self) -> bool:
        """Return whether the upper end of what is used stays inside the device's memory."""
        return (self.used.high or self.used.bytes) <= self.capacity_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes left at the predicted peak; negative when it does not fit."""
        return self.capacity_bytes - self.used.bytes

    @property
    def way_out(self) -> Rung | None:
        """The fastest way that fits and trains the same; None where the script fits as it is.

        One that fits even if all that is uncertain errs upwards goes before one that may.
        """
        if self.fits:
            return None
        fitting = [rung for rung in self.ladder if rung.fits and rung.choices]
        fitting.sort(key=lambda rung: (rung.changes_training, not self.is_sure(rung)))
        return next(iter(fitting), None)

    def is_sure(self, rung: Rung) -> bool:
        """Return whether a way fits by as much as is uncertain about the script as it is."""
        uncertain = (self.used.high or self.used.bytes) - self.used.bytes
        return rung.fits and rung.peak_bytes + uncertain <= self.capacity_bytes

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return to_plain(self) | {"fits": self.fits, "spare_bytes": self.spare_bytes}
