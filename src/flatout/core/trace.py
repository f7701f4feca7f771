"""What a trace of a few steps showed, summed up."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEntry:
    """One kernel or operator, all its calls together."""

    name: str
    calls_per_step: float
    ms_per_step: float
    """Of a kernel its time on the device, of an operator its self time on the host."""
    share: float
    """`ms_per_step` over the traced step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleSplit:
    """Shares of the traced time in which the device ran nothing, by cause."""

    host_wait_share: float
    """The next kernel had not been launched yet: the host was late."""
    kernel_wait_share: float
    """It had been launched, and started after the usual gap between two kernels."""
    other_share: float
    """It had been launched and still did not start: events, memory, another stream."""

    @property
    def idle_share(self) -> float:
        """All three together."""
        return self.host_wait_share + self.kernel_wait_share + self.other_share


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSummary:
    """What the traced steps held. The profiler slows them: shares count, not milliseconds."""

    steps: int
    step_ms: float
    """Mean traced step, the profiler's own cost included."""
    kernels: tuple[TraceEntry, ...] = ()
    """Largest first; empty where no device was traced."""
    operators: tuple[TraceEntry, ...] = ()
    """By self time on the host, largest first."""
    idle: IdleSplit | None = None
    exposed_communication_ms: float | None = None
    """Time of a step in which the device ran communication kernels and nothing else."""
    layout_conversion_share: float | None = None
    """Share of the kernels' time that only changes memory layouts."""
    product_share: float | None = None
    """Share of the kernels' time, without a device of the operators' own time, in matrix products,
    convolutions and attention, by their names."""
    tensor_core_share: float | None = None
    """Share of the kernels' time in kernels that use tensor cores, by their names."""
    path: str = ""
    """Where the trace was written; empty where none was."""
    file_bytes: int = 0
    missing: Mapping[str, str] = field(default_factory=dict)
    """What is not known, each with the reason."""


def trace_from_json(plain: Mapping[str, Any]) -> TraceSummary:
    """Return the summary that `dataclasses.asdict` wrote."""
    entries = {
        name: tuple(TraceEntry(**item) for item in plain[name]) for name in ("kernels", "operators")
    }
    idle = IdleSplit(**plain["idle"]) if plain["idle"] else None
    return TraceSummary(**{**plain, **entries, "idle": idle})
