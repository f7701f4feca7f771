"""What instruments alongside the training showed: counters, waits, limits, ranks, a trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncPoint:
    """A source line that makes the host wait for the device."""

    line: str
    """`file.py:line`."""
    what: str
    """The operation: `item`, `to cpu`, `nonzero`, `print`, ..."""
    per_step: float
    ms_per_step: float | None = None
    """What the wait cost; None where nothing had to be waited for (a CPU-only run)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReadings:
    """Counters of the device while the measured steps ran.

    Shares, power and rates are means over the samples, memory is the most that was seen, clocks
    and temperature are medians. A reading that the device does not offer is None, and `missing`
    says why.
    """

    util_share: float | None = None
    """What nvidia-smi calls GPU-Util: share of time with at least one kernel, NVML's way."""
    sm_active_share: float | None = None
    tensor_active_share: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    clock_mhz: float | None = None
    max_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttle: tuple[str, ...] = ()
    """Reasons for lower clocks that were active in the window."""
    throttle_shares: Mapping[str, float] = field(default_factory=dict)
    """Of each reason in `throttle`: the share of the samples in which it was active."""
    pcie_rx_bytes_per_s: float | None = None
    pcie_tx_bytes_per_s: float | None = None
    other_processes: int = 0
    """Processes on the device that do not belong to this training."""
    other_idle_processes: int = 0
    """Those that hold memory and ran next to nothing in the window, where the driver tells."""
    uuid: str = ""
    """The device that was read, by the driver's name for it."""
    samples: int = 0
    series: tuple[tuple[float, float], ...] = ()
    """Seconds since the first sample and GPU-Util then."""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What this machine could do at most for these steps, measured on it."""

    flops_per_step: float | None = None
    """Floating-point operations of forward and backward, counted once; recompute not counted."""
    gemm_flops_per_s: float | None = None
    """Measured rate of a large matrix product in the training's dtype."""
    gemm_dtype: str = ""
    memory_bytes_per_s: float | None = None
    """Measured rate of copying memory on the device, bytes read plus written."""
    copy_bytes_per_s: float | None = None
    """Measured rate from host memory to the device; on the CPU of a copy in memory."""
    loader_samples_per_s: float | None = None
    """The loader alone, nothing else running."""
    least_step_ms: float | None = None
    """`flops_per_step` at `gemm_flops_per_s`: no step with this maths is shorter."""
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFacts:
    """One process of a multi-process training."""

    rank: int
    step_ms: float
    phases_ms: Mapping[str, float]
    samples_per_s: float
    exposed_communication_ms: float | None = None
    """Time of the step in which the rank did nothing but communicate."""
    is_straggler: bool = False
    because: str = ""
    """Why it is behind: the phase in which it spends more than the others."""
    first_batch: str = ""
    """Digest of the first batch's samples and what they hold; empty where it is not known."""
    device: str = ""
    """The GPU it trains on, by the driver's name for it; empty on a CPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileFacts:
    """What torch.compile did in one process, by torch's own log."""

    seconds: float
    recompiles: int = 0
    """Compilations of functions that had been compiled before."""
    recompile_s: float = 0.0
    most: int = 0
    """Recompilations of the function that had the most of them."""
    place: str = ""
    """`file.py:line` of that function."""
    reason: str = ""
    """What was different the last time, in torch's words."""


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
class Consumer:
    """One place of the user's code, with all that its operators take forward and backward."""

    module: str
    """Its name in the model, with the numbers of repeated layers left open; empty outside one."""
    line: str
    """`file.py:line`; empty where none of the user's was running."""
    share: float
    """Of the traced step."""
    operators: tuple[TraceEntry, ...] = ()
    """The largest of its operators, each with its part of the time."""


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
    consumers: tuple[Consumer, ...] = ()
    """Places of the user's code with the most of the operators' own time; looked for on a CPU."""
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
