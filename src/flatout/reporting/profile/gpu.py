"""The section on the trace: what ran, what did not, and where the file lies.

The section on the device's counters: what is often taken for one another, side by side.
"""

from collections.abc import Callable, Iterator, Sequence

from flatout.records.profile import Profile
from flatout.records.readings import GpuReadings, TraceEntry, TraceSummary
from flatout.records.units import format_bytes, format_count, format_ms, format_share
from flatout.reporting.tables import Column, labelled, table

LABEL_WIDTH = 11
MAX_REASONS = 2
"""Different reasons for missing readings that are printed; JSON has all."""
WORDS = {
    "all": "the counters",
    "util_share": "GPU-Util",
    "sm_active_share": "SM active",
    "tensor_active_share": "tensor active",
    "memory_used_bytes": "memory",
    "power_w": "power",
    "clock_mhz": "clock",
    "temperature_c": "temperature",
    "throttle": "reasons for lower clocks",
    "pcie_rx_bytes_per_s": "PCIe",
    "other_processes": "other processes",
}
"""What a reader calls a reading; those left out here are not worth a line when missing."""


def gpu_lines(profile: Profile, width: int) -> list[str]:
    """Return the device's counters side by side; nothing where the training used no GPU."""
    gpu = profile.gpu
    if gpu is None:
        return []
    rows = [("GPU shares", _shares(profile, gpu)), ("GPU state", ", ".join(_state(gpu)))]
    rows += [("GPU clocks", _lowered(gpu)), ("not known", "; ".join(_missing(gpu)))]
    return [
        line
        for label, text in rows
        if text
        for line in labelled(label.ljust(LABEL_WIDTH), text, width)
    ]


def _shares(profile: Profile, gpu: GpuReadings) -> str:
    """Return what is often taken for one another, from the most flattering to the truest."""
    named = (
        ("GPU-Util", gpu.util_share),
        ("device busy", profile.device_busy_share),
        ("SM active", gpu.sm_active_share),
        ("tensor active", gpu.tensor_active_share),
    )
    text = ", ".join(f"{name} {format_share(value)}" for name, value in named if value is not None)
    return f"{text} ({gpu.samples} samples)" if gpu.samples else text


def _state(gpu: GpuReadings) -> Iterator[str]:
    if gpu.memory_used_bytes is not None:
        yield _of(format_bytes, gpu.memory_used_bytes, gpu.memory_total_bytes)
    if gpu.power_w is not None:
        yield _of(lambda watts: f"{watts:.0f} W", gpu.power_w, gpu.power_limit_w)
    if gpu.clock_mhz is not None:
        yield _of(lambda mhz: f"{mhz:.0f} MHz", gpu.clock_mhz, gpu.max_clock_mhz)
    if gpu.temperature_c is not None:
        yield f"{gpu.temperature_c:.0f} C"
    if gpu.pcie_rx_bytes_per_s is not None:
        yield f"PCIe in {format_bytes(gpu.pcie_rx_bytes_per_s)}/s"
    if gpu.pcie_tx_bytes_per_s is not None:
        yield f"PCIe out {format_bytes(gpu.pcie_tx_bytes_per_s)}/s"


def _of(render: Callable[[float], str], value: float, limit: float | None) -> str:
    return f"{render(value)} of {render(limit)}" if limit else render(value)


def _lowered(gpu: GpuReadings) -> str:
    reasons = [f"{name} ({format_share(gpu.throttle_shares[name])})" for name in gpu.throttle]
    return f"lowered in some samples: {', '.join(reasons)}" if reasons else ""


def _missing(gpu: GpuReadings) -> Iterator[str]:
    by_reason: dict[str, list[str]] = {}
    for name, reason in gpu.missing.items():
        if name in WORDS:
            by_reason.setdefault(reason, []).append(WORDS[name])
    for reason, names in list(by_reason.items())[:MAX_REASONS]:
        yield f"{', '.join(names)}: {reason}"


MOST = 5
"""Rows: what lies below the fifth is for the viewer."""
NAME_WIDTH = 48
"""Kernels carry their template arguments in their names; the beginning tells them apart."""


def trace_lines(profile: Profile, width: int) -> list[str]:
    """Return the top kernels or operators and the readings; nothing without a trace."""
    trace = profile.trace
    if trace is None:
        return []
    title = "kernel" if trace.kernels else "operator, self time on the host"
    lines = ["", *_table(title, trace.kernels or trace.operators)]
    lines.append("")
    for label, text in _readings(trace):
        lines += labelled(label.ljust(11), text, width)
    return lines


def _table(title: str, entries: Sequence[TraceEntry]) -> list[str]:
    columns = [
        Column(title),
        Column("calls/step", is_number=True),
        Column("ms/step", is_number=True),
        Column("share", is_number=True),
    ]
    rows = [
        [
            entry.name[:NAME_WIDTH],
            f"{entry.calls_per_step:g}",
            format_count(entry.ms_per_step, 3),
            format_share(entry.share),
        ]
        for entry in entries[:MOST]
    ]
    return table(columns, rows)


def _readings(trace: TraceSummary) -> Iterator[tuple[str, str]]:
    if trace.idle is not None:
        yield (
            "idle",
            f"{format_share(trace.idle.idle_share)} of the traced time: "
            f"{format_share(trace.idle.host_wait_share)} the host was late, "
            f"{format_share(trace.idle.kernel_wait_share)} between queued kernels, "
            f"{format_share(trace.idle.other_share)} other",
        )
    if trace.exposed_communication_ms:
        yield "exposed", f"{format_ms(trace.exposed_communication_ms)} a step of communication"
    if trace.layout_conversion_share:
        share = format_share(trace.layout_conversion_share)
        yield "layouts", f"{share} of the kernels' time converts memory layouts"
    if trace.tensor_core_share is not None:
        share = format_share(trace.tensor_core_share)
        yield "tensor", f"{share} of the kernels' time is in tensor-core kernels, by their names"
    where = f", {format_bytes(trace.file_bytes)} in {trace.path}" if trace.path else ""
    yield (
        "trace",
        f"{trace.steps} steps of {format_ms(trace.step_ms)} under the profiler, "
        f"which slows them: read shares{where}",
    )
