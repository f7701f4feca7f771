"""What a trace of the device's kernels and copies sums up to."""

from pathlib import Path

import pytest
import torch
from torch import autograd

from flatout.agent.measuring import kernels as one_profiler
from flatout.agent.measuring.kernels import (
    DeviceTrace,
    KernelTrace,
    busy_share,
    copied_to_device_s,
    trace_facts,
)


def event(kind, start_s, length_s, name="a"):
    return {"ph": "X", "cat": kind, "name": name, "ts": 1e6 * start_s, "dur": 1e6 * length_s}


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
    instant = {"cat": "kernel", "ph": "i", "name": "an instant", "ts": 9e6}
    trace = [event("kernel", 2.0, 0.5, "gemm"), event("cuda_runtime", 1.0, 2.0), instant]

    facts = trace_facts(DeviceTrace(events=trace, lasted_s=1.0), segments=1)

    assert facts["busy_share"] == pytest.approx(0.5)
    assert [entry.name for entry in facts["trace"].kernels] == ["gemm"]


def test_what_more_segments_did_is_told_for_one():
    copy = event("gpu_memcpy", 5.0, 4.0, "Memcpy HtoD (Pageable -> Device)")
    kernels = [event("kernel", float(number), 1.0, "gemm") for number in range(4)]

    facts = trace_facts(DeviceTrace(events=[*kernels, copy]), segments=8)

    assert (facts["busy_share"], facts["h2d_s_per_segment"]) == (1.0, 0.5)
    assert facts["trace"].kernels[0].calls_per_step == 0.5
    assert facts["trace"].kernels[0].ms_per_step == 500.0
    assert facts["trace"].product_share == 1.0


def test_time_before_the_first_launch_is_time_the_device_waited():
    kernel = event("kernel", 5.0, 1.0)

    facts = trace_facts(DeviceTrace(events=[kernel], lasted_s=4.0), segments=1)

    assert facts["trace"].step_ms == pytest.approx(4000.0)
    assert facts["trace"].idle.host_wait_share == pytest.approx(0.75)
    assert facts["busy_share"] == pytest.approx(0.25)


def test_without_a_kernel_nothing_is_told_of_kernels():
    facts = trace_facts(DeviceTrace(events=[]), segments=3)

    assert (facts["busy_share"], facts["trace"]) == (None, None)


def test_the_trace_waits_for_the_device_of_the_training(monkeypatch):
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(one_profiler, "_turn", one_profiler._Turn(is_watching=True))
    trace = KernelTrace(torch.device("cuda:1"))

    trace.start()
    found = trace.stop()

    assert found.events == []
    assert found.lasted_s > 0
    assert waited == [torch.device("cuda:1")] * 2


def test_a_script_that_begins_its_own_profile_keeps_it_and_the_trace_says_why_it_has_none(
    monkeypatch,
):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr("torch.profiler.profile", Profiler)
    monkeypatch.setattr(one_profiler, "_turn", one_profiler._Turn())
    monkeypatch.setattr(autograd.profiler, "profile", ScriptsProfile)
    trace = KernelTrace(torch.device("cuda:0"))
    trace.start()

    autograd.profiler.profile()._prepare_trace(trace.profile)

    with pytest.raises(RuntimeError, match="script uses torch's profiler"):
        trace.stop()
    with pytest.raises(RuntimeError, match="script uses torch's profiler"):
        KernelTrace(torch.device("cuda:0")).start()


class ScriptsProfile:
    """Stands for the class that all of torch's profiles go through."""

    def _prepare_trace(self, other):
        assert other.has_ended

    def _start_trace(self):
        """Start."""


class Profiler:
    """Stands for torch's, which needs a device to see anything."""

    def __init__(self, **_options):
        self.has_ended = False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.has_ended = True

    def export_chrome_trace(self, path):
        Path(path).write_text('{"traceEvents": []}')
