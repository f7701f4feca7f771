"""Facts of a device that answers, and of one that failed."""

from types import SimpleNamespace

import torch

from flatout.agent.recorder import device_seen
from flatout.agent.session import Session
from flatout.records.profile import PeakBytes
from flatout.records.trial_result import DeviceSeen
from flatout.records.trial_spec import TrialSpec

PLACE = torch.device("cuda:1")


def with_device(monkeypatch, **changes):
    """Put a second GPU in place, on which the training is, while the first is the current one."""

    def only_there(value):
        def answer(device):
            assert device == PLACE
            return value

        return answer

    parts = {
        "is_initialized": lambda: True,
        "current_device": lambda: 0,
        "max_memory_allocated": only_there(70),
        "max_memory_reserved": only_there(80),
        "get_device_name": only_there("NVIDIA H200"),
        "get_device_properties": only_there(SimpleNamespace(uuid="5a1f")),
        "mem_get_info": only_there((100, 190)),
    }
    for name, value in (parts | changes).items():
        monkeypatch.setattr(torch.cuda, name, value)
    session = Session(TrialSpec())
    parameter = SimpleNamespace(device=PLACE)
    session.add_root(SimpleNamespace(parameters=lambda: iter([parameter])))
    return session


def test_the_trainings_device_tells_its_name_and_what_was_held(monkeypatch):
    session = with_device(monkeypatch)

    facts = device_seen(session)

    peak = PeakBytes(allocated=70, reserved=80, device=90)
    assert facts == DeviceSeen(kind="cuda", name="NVIDIA H200", uuid="5a1f", peak=peak)
    assert session.errors == []


def test_a_device_that_failed_keeps_what_the_allocator_knows(monkeypatch):
    def lost(_device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    session = with_device(monkeypatch, mem_get_info=lost)

    facts = device_seen(session)

    assert facts.peak == PeakBytes(allocated=70, reserved=80, device=0)
    assert "illegal memory access" in session.errors[0]


def test_a_process_that_never_used_its_device_ran_on_the_cpu(monkeypatch):
    session = with_device(monkeypatch, is_initialized=lambda: False)

    assert device_seen(session).kind == "cpu"
