"""Phases by events of a device that is not here: which stream, when read, what a failure leaves."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from flatout.agent.measuring import device_clock
from flatout.agent.measuring.device_clock import DeviceClock, reached_at
from flatout.agent.session import Session
from flatout.records.phase_clock import BACKWARD, FORWARD, NAMES
from flatout.records.trial_spec import TrialSpec


class Event:
    """Stands for an event: it happens at the next moment of its stream's own time."""

    def __init__(self, *, enable_timing):
        self.is_timed = enable_timing
        self.at_ms = self.stream = None

    def record(self, stream):
        assert self.is_timed
        self.at_ms, self.stream = stream.now_ms, stream
        stream.recorded += 1

    def elapsed_time(self, later):
        assert later.stream is self.stream  # CUDA compares no events of two devices
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


def root_on(*names):
    parameters = [SimpleNamespace(device=torch.device(name)) for name in names]
    return SimpleNamespace(parameters=lambda: iter(parameters))


def begin(*names):
    session = Session(TrialSpec(mode="measure"))
    clock = DeviceClock(session)
    session.fire("root", root_on(*names or ("cuda:1",)))
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
        return [event]

    marks = [at(0.0), at(9.0), at(4.0), at(10.0)]

    assert list(reached_at(marks)) == pytest.approx([0.0, 9e-3, 9e-3, 10e-3])


@pytest.mark.parametrize("roots", [[("cuda:0", "cuda:1")], [("cuda:0",), ("cuda:1",)]])
def test_a_phase_is_over_when_every_device_of_the_models_has_reached_its_end(device, roots):
    session = Session(TrialSpec(mode="measure"))
    clock = DeviceClock(session)
    first, second = device.streams.values()
    second.now_ms = 500.0  # each device has a time of its own
    for names in roots:
        session.fire("root", root_on(*names))
    for _ in range(3):
        session.clock.push(FORWARD)
        first.now_ms += 1.0
        second.now_ms += 4.0  # waits for the other device, then computes
        session.clock.pop()
        session.clock.push(BACKWARD)
        second.now_ms += 2.0
        first.now_ms += 7.0
        session.clock.pop()
        first.now_ms = max(first.now_ms, second.now_ms - 500.0)
        second.now_ms = first.now_ms + 500.0
        session.end_segment(0)

    clock.resolve()

    assert clock.device == torch.device("cuda:0")
    for segment in session.segments[1:]:
        by_name = dict(zip(NAMES, segment.seconds, strict=True))
        assert by_name["forward"] == pytest.approx(4e-3)
        assert by_name["backward"] == pytest.approx(4e-3)
        assert sum(segment.seconds) == pytest.approx(8e-3)
    assert session.errors == []


def test_the_time_that_the_marks_take_of_the_host_is_counted(device, monkeypatch):
    moments = itertools.count()
    monkeypatch.setattr(device_clock.time, "perf_counter", lambda: next(moments))
    _session, clock = begin()

    clock.mark(FORWARD)
    clock.mark(BACKWARD)

    assert clock.marking_s == 3.0  # a second each, the one at the start among them
    assert len(clock.marks) == 3
