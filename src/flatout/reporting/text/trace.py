"""The section on the trace: what ran, what did not, and where the file lies."""

from collections.abc import Iterator, Sequence

from flatout.core.profile import Profile
from flatout.core.trace import TraceEntry, TraceSummary
from flatout.core.units import format_bytes, format_count, format_ms, format_share
from flatout.reporting.tables import Column, labelled, table

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
