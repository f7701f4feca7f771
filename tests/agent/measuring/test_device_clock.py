"""Phases by events of a device that is not here: which stream, when read, what a failure leaves."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from flatout.agent.measuring import device_clock
from flatout.agent.measuring.device_clock import DeviceClock, phase_seconds
from flatout.agent.session import Session
from flatout.records.phase_clock import BACKWARD, FORWARD, NAMES, OTHER
from flatout.records.trial_spec import TrialSpec


class Event:
    """Stands for an event: it happens at the next moment of its stream's own time."""

    def __init__(self, *, enable_timing):
        self.is_timed = enable_timing
        self.at_ms = None

    def record(self, stream):
        assert self.is_timed
        self.at_ms = stream.now_ms
        stream.recorded += 1

    def elapsed_time(self, later):
        return later.at_ms - self.at_ms


class Stream:
    def __init__(self):
        self.now_ms = 0.0
        self.recorded = 0


@pytest.fixture
def device(monkeypatch):
    """Two devices, the first of them current; what is asked of them is counted."""
    streams = {torch.device("cuda:0"): Stream(), torch.device("cuda:1"): Stream()}
    seen = SimpleNamespace(streams=streams, synchronised=[], is_capturing=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[device])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: seen.is_capturing)
    monkeypatch.setattr(torch.cuda, "synchronize", seen.synchronised.append)
    return seen


def root_on(name):
    parameter = SimpleNamespace(device=torch.device(name))
    return SimpleNamespace(parameters=lambda: iter([parameter]))


def begin(name="cuda:1"):
    session = Session(TrialSpec(mode="measure"))
    clock = DeviceClock(session)
    session.fire("root", root_on(name))
    return session, clock


def step(session, stream):
    """Make a step whose forward takes 3 ms on the device and backward 5, and 2 pass between."""
    for phase, takes_ms in ((FORWARD, 3.0), (BACKWARD, 5.0)):
        session.clock.push(phase)
        stream.now_ms += takes_ms
        session.clock.pop()
    stream.now_ms += 2.0
    session.end_segment(0)


def test_phases_take_what_passed_on_the_device_of_the_model_though_another_is_current(device):
    session, clock = begin("cuda:1")
    stream = device.streams[torch.device("cuda:1")]
    for _ in range(3):
        step(session, stream)
    asked_before_the_end = list(device.synchronised)

    clock.resolve()

    assert asked_before_the_end == []
    assert device.synchronised == [torch.device("cuda:1")]
    assert device.streams[torch.device("cuda:0")].recorded == 0
    for segment in session.segments[1:]:
        by_name = dict(zip(NAMES, segment.seconds, strict=True))
        assert by_name["forward"] == pytest.approx(3e-3)
        assert by_name["backward"] == pytest.approx(5e-3)
        assert by_name["other"] == pytest.approx(2e-3)


def test_nothing_is_recorded_while_the_script_captures_a_graph(device):
    session, clock = begin()
    stream = device.streams[torch.device("cuda:1")]
    step(session, stream)
    before = stream.recorded
    device.is_capturing = True
    step(session, stream)
    in_capture = stream.recorded - before
    device.is_capturing = False
    step(session, stream)

    clock.resolve()

    assert in_capture == 0
    assert sum(session.segments[2].seconds) == pytest.approx(20e-3)  # with the one before
    assert session.errors == []


def test_a_device_that_failed_leaves_the_hosts_seconds_and_a_note(device, monkeypatch):
    session, clock = begin()
    for _ in range(3):
        step(session, device.streams[torch.device("cuda:1")])
    before = [list(segment.seconds) for segment in session.segments]

    def lost(_device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    clock.resolve()

    assert [segment.seconds for segment in session.segments] == before
    assert "illegal memory access" in session.errors[0]


def test_an_event_that_cannot_be_recorded_does_not_end_the_training(device, monkeypatch):
    session, _ = begin()

    def lost(_device):
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(torch.cuda, "current_stream", lost)
    step(session, Stream())

    assert any("device-side assert" in error for error in session.errors)


def test_without_a_root_on_a_device_nothing_is_recorded(device):
    session, clock = begin("cpu")
    step(session, Stream())

    clock.resolve()

    assert clock.marks == []


def test_a_mark_on_a_stream_that_is_ahead_makes_no_phase_negative():
    def at(milliseconds):
        event = Event(enable_timing=True)
        event.at_ms = milliseconds
        return event

    marks = [(FORWARD, at(0.0)), (BACKWARD, at(9.0)), (OTHER, at(4.0)), (OTHER, at(10.0))]

    seconds = phase_seconds(marks)

    assert seconds[FORWARD] == pytest.approx(9e-3)
    assert seconds[BACKWARD] == 0.0
    assert sum(seconds) == pytest.approx(10e-3)


def test_the_time_that_the_marks_take_of_the_host_is_counted(device, monkeypatch):
    moments = itertools.count()
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: next(moments))
    _session, clock = begin()

    clock.mark(FORWARD)
    clock.mark(BACKWARD)

    assert clock.marking_s == 3.0  # a second each, the one at the start among them
    assert len(clock.marks) == 3
