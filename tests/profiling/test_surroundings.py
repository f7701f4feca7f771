"""Facts of a device that answers, and of one that failed."""

from types import SimpleNamespace

import torch

from flatout.profiling.surroundings import device_facts


def with_device(monkeypatch, **changes):
    parts = {
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda: 70,
        "max_memory_reserved": lambda: 80,
        "get_device_name": lambda: "NVIDIA H200",
        "get_device_properties": lambda: SimpleNamespace(uuid="5a1f"),
        "mem_get_info": lambda: (100, 190),
    }
    for name, value in (parts | changes).items():
        monkeypatch.setattr(torch.cuda, name, value)


def test_a_device_tells_its_name_and_what_was_held(monkeypatch):
    with_device(monkeypatch)
    errors = []

    facts = device_facts(errors.append)

    assert facts == {
        "kind": "cuda",
        "name": "NVIDIA H200",
        "uuid": "5a1f",
        "peak": {"allocated": 70, "reserved": 80, "device": 90},
    }
    assert errors == []


def test_a_device_that_failed_keeps_what_the_allocator_knows(monkeypatch):
    def lost():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with_device(monkeypatch, mem_get_info=lost)
    errors = []

    facts = device_facts(errors.append)

    assert facts["peak"] == {"allocated": 70, "reserved": 80, "device": 0}
    assert "illegal memory access" in errors[0]


def test_a_process_that_never_used_its_device_ran_on_the_cpu(monkeypatch):
    with_device(monkeypatch, is_initialized=lambda: False)

    assert device_facts(print)["kind"] == "cpu"
