"""What a trace of the device's kernels and copies sums up to."""

from pathlib import Path

import pytest
import torch

from flatout.profiling.kernels import (
    KernelTrace,
    busy_share,
    copied_to_device_s,
    device_events,
    trace_facts,
)


def event(kind, start_s, length_s, name="a"):
    return {"kind": kind, "name": name, "start_s": start_s, "length_s": length_s}


def test_a_copy_beside_the_computation_costs_the_step_nothing():
    kernels = [event("kernel", 0.0, 2.0), event("kernel", 3.0, 2.0)]
    hidden = [event("gpu_memcpy", 0.5, 1.0, "Memcpy HtoD (Pinned -> Device)")]
    half = [event("gpu_memcpy", 2.5, 1.0, "Memcpy HtoD (Pageable -> Device)")]

    assert copied_to_device_s(kernels + hidden) == 0.0
    assert copied_to_device_s(kernels + half) == pytest.approx(0.5)
    assert copied_to_device_s(hidden + half) == pytest.approx(2.0)


def test_copies_back_and_on_the_device_are_no_copies_to_it():
    events = [event("gpu_memcpy", 0.0, 1.0, f"Memcpy {way}") for way in ("DtoH", "DtoD")]

    assert copied_to_device_s(events) == 0.0


def test_kernels_on_two_streams_are_counted_once():
    events = [event("kernel", 0.0, 2.0), event("kernel", 1.0, 2.0), event("kernel", 4.0, 1.0)]

    assert busy_share(events) == pytest.approx(4 / 5)
    assert busy_share([]) is None


def test_only_what_ran_on_the_device_is_taken_from_a_trace():
    trace = [
        {"cat": "kernel", "ph": "X", "name": "gemm", "ts": 2e6, "dur": 5e5},
        {"cat": "cpu_op", "ph": "X", "name": "aten::mm", "ts": 1e6, "dur": 2e6},
        {"cat": "kernel", "ph": "i", "name": "an instant", "ts": 2e6},
        {"ph": "M", "name": "process_name"},
    ]

    assert device_events(trace) == [event("kernel", 2.0, 0.5, "gemm")]


def test_what_more_segments_did_is_told_for_one():
    copy = event("gpu_memcpy", 5.0, 4.0, "Memcpy HtoD (Pageable -> Device)")
    kernels = [event("kernel", float(number), 1.0) for number in range(4)]

    facts = trace_facts([*kernels, copy], segments=8)

    assert facts == {"busy_share": 1.0, "h2d_s_per_segment": 0.5, "kernels_per_segment": 0.5}


def test_the_trace_waits_for_the_device_of_the_training(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr("torch.profiler.profile", Profiler)
    trace = KernelTrace(torch.device("cuda:1"))

    trace.start()
    events = trace.stop()

    assert events == []
    assert waited == [torch.device("cuda:1")] * 2


class Profiler:
    """Stands for torch's, which needs a device to see anything."""

    def __init__(self, **_options):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def export_chrome_trace(self, path):
        Path(path).write_text('{"traceEvents": []}')
