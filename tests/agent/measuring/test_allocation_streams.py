import torch

from flatout.agent.measuring.allocation_streams import CudaStream, _woven
from flatout.analysis.allocations import AllocationEvent, AllocationSite


def call(action, address, size, at_us):
    return {"action": action, "addr": address, "size": size, "time_us": at_us}


def test_remarks_stand_between_the_allocations_that_the_counters_tell():
    calls = [
        call("alloc", 16, 100, 1_000),
        call("alloc", 32, 512, 2_000),
        call("free_requested", 16, 100, 4_000),
    ]
    forward, end = (
        AllocationEvent(0.0, place=AllocationSite("forward")),
        AllocationEvent(0.0, ends_step=True),
    )

    events = _woven(calls, [(70, [forward]), (71, [forward]), (73, [end])], began=70)

    assert events == [
        forward,
        AllocationEvent(0.0, 16, 512),
        forward._replace(at_ms=1.0),
        AllocationEvent(1.0, 32, 512),
        AllocationEvent(3.0, 16, -512),
        end._replace(at_ms=3.0),
    ]


def test_the_allocations_are_those_of_the_device_that_was_named(monkeypatch):
    reset = []
    counts = {"allocation": {"all": {"allocated": 5, "freed": 2}}}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset.append)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda number: 100 + number)
    monkeypatch.setattr(
        torch._C, "_cuda_memoryStats", lambda number: counts if number == 1 else None, raising=False
    )
    stream = CudaStream(1)

    stream.start()

    assert reset == [1]
    assert stream.total() == 101


def test_peaks_are_those_of_phases(monkeypatch):
    bytes_of = {"all": {"peak": 700}}
    stats = {"allocation": {"all": {"allocated": 5, "freed": 2}}, "allocated_bytes": bytes_of}
    stats |= {"reserved_bytes": bytes_of, "num_alloc_retries": 0}
    stats |= {"inactive_split_bytes": {"all": {"current": 0}}}
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *_, **__: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: None)
    monkeypatch.setattr(torch._C, "_cuda_memoryStats", lambda _: stats, raising=False)
    stream = CudaStream(0)

    stream.start()
    for phase in ("other", "forward", "other"):
        stream.at(AllocationSite(phase))

    assert stream.facts()["peaks"] == {"other": 700, "forward": 700}
