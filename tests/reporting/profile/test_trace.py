from dataclasses import replace

from flatout.records.profile import profile_from_json
from flatout.records.readings import IdleSplit, TraceEntry, TraceSummary
from flatout.reporting.profile.gpu import trace_lines

ENTRY = TraceEntry(name="gemm", calls_per_step=2, ms_per_step=1.5, share=0.3)
ON_CPU = TraceSummary(steps=5, step_ms=5.0, operators=(ENTRY,), missing={"idle": "no device"})
ON_DEVICE = TraceSummary(
    steps=3,
    step_ms=5.0,
    kernels=(replace(ENTRY, name="x" * 200), ENTRY),
    idle=IdleSplit(host_wait_share=0.3, kernel_wait_share=0.02, other_share=0.08),
    exposed_communication_ms=0.5,
    layout_conversion_share=0.1,
    tensor_core_share=0.6,
    path="trace.json.gz",
    file_bytes=3 * 1024**2,
)


def test_nothing_is_said_without_a_trace(busy):
    assert trace_lines(busy, 80) == []


def test_the_trace_of_a_device(busy, snapshot):
    assert "\n".join(trace_lines(replace(busy, trace=ON_DEVICE), 80)) == snapshot


def test_without_a_device_the_operators_are_shown(busy, snapshot):
    assert "\n".join(trace_lines(replace(busy, trace=ON_CPU), 80)) == snapshot


def test_lines_fit_the_terminal(busy):
    assert max(map(len, trace_lines(replace(busy, trace=ON_DEVICE), 80))) <= 80


def test_summary_survives_json(busy):
    profile = replace(busy, trace=ON_DEVICE)

    assert profile_from_json(profile.to_json()).trace == ON_DEVICE
