"""The recorder's trace of a device that is not here: what it is divided by and what it leaves."""

import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flatout.agent import recorder as recording
from flatout.agent.measuring.kernels import TRACED_STEPS, DeviceTrace
from flatout.agent.recorder import Recorder
from flatout.agent.session import Session
from flatout.records.trial_result import Segment
from flatout.records.trial_spec import TrialSpec

TIMED = 20


class Trace:
    """Stands for the profiler: thirty-four kernels and two seconds of copies."""

    def __init__(self, device):
        self.device = device

    def start(self):
        pass

    def stop(self):
        whole = {"ph": "X", "ts": 0.0, "dur": 1e6}
        kernels = [whole | {"cat": "kernel", "name": "a"}] * 34
        copy = whole | {"cat": "gpu_memcpy", "name": "Memcpy HtoD", "ts": 3e6, "dur": 1.7e6}
        return DeviceTrace(events=[*kernels, copy])


@pytest.fixture
def recorder(tmp_path, monkeypatch):
    """A recorder that has enough steps on a device and has begun to trace more."""
    monkeypatch.setattr(recording, "KernelTrace", Trace)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    spec = TrialSpec(folder=str(tmp_path), measure_s=9.0, traces_kernels=True)
    recorder = Recorder(Session(spec))
    recorder.stops = 0
    monkeypatch.setattr(recorder, "_stop", lambda: setattr(recorder, "stops", recorder.stops + 1))
    recorder.device.torch, recorder.device.devices = torch, [torch.device("cuda:1")]
    recorder.device.bounds = [SimpleNamespace()]
    recorder.session.segments += [Segment(who=0) for _ in range(TIMED)]
    recorder.session.counts[0] = TIMED
    recorder.read_load()
    recorder._begin_trace()
    return recorder


def train(recorder, steps):
    recorder.session.segments += [Segment(who=0) for _ in range(steps)]


def test_steps_that_were_told_in_a_group_are_all_counted(recorder):
    train(recorder, 17)  # as many as rest together at most, for three that were asked for

    recorder._end_trace()

    (kernel,) = recorder.traced["trace"].kernels
    assert kernel.calls_per_step == pytest.approx(2.0)
    assert recorder.traced["h2d_s_per_segment"] == pytest.approx(0.1)
    assert len(recorder.session.segments) == TIMED
    assert recorder.stops == 1


def test_steps_that_take_long_are_traced_once(recorder):
    for number, segment in enumerate(recorder.session.segments):
        segment.end = 20.0 * number

    recorder._begin_trace()

    assert recorder.trace_until == TIMED + 1


def test_too_few_steps_do_not_end_the_trace(recorder):
    train(recorder, TRACED_STEPS - 1)

    recorder._end_trace()

    assert recorder.traced == {}
    assert recorder.stops == 0


def test_a_script_that_ends_in_the_trace_leaves_the_timed_steps_only(recorder):
    train(recorder, 2)

    assert len(recorder._with_losses()) == TIMED


def test_the_load_while_steps_are_traced_is_not_that_of_the_timed_ones(recorder, monkeypatch):
    measured = [SimpleNamespace(end=recorder.readings[-1].at_s, wall_s=0.0)]
    window = SimpleNamespace(measured=measured)
    monkeypatch.setattr(recording.stepping, "steps_of", lambda _: ())
    monkeypatch.setattr(recording.stepping, "window_of", lambda *_: window)
    asked = []

    def between(*pair):
        asked.append(pair)
        return SimpleNamespace(
            delay_share=0.0, foreign_share=0.0, steal_share=0.0, minor_faults=0, wall_s=1.0
        )

    monkeypatch.setattr(
        recorder, "meter", SimpleNamespace(between=between, read=recorder.meter.read)
    )
    timed_until = recorder.readings[-1]

    recorder.read_load()
    recorder.load()

    assert asked[0][1] is timed_until


def test_counters_of_one_rank_are_not_taken_from_those_of_all(recorder):
    assert recorder.readings
    recorder.ranks = SimpleNamespace(is_alone=False)
    recorder.spec = replace(recorder.spec, root_pid=os.getppid())

    recorder.read_load()
    assert len(recorder.readings) == 1

    recorder.read_load()
    assert len(recorder.readings) == 2


def test_the_device_of_the_model_is_traced(recorder):
    assert recorder.trace.device == torch.device("cuda:1")


def test_on_the_cpu_nothing_is_traced(recorder):
    recorder.trace = recorder.traced_from = None
    recorder.device.bounds = []

    recorder._begin_trace()

    assert recorder.trace is None
    assert recorder.stops == 1


def test_no_trace_begins_while_the_script_captures_a_graph(recorder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorder.trace = None

    recorder._begin_trace()

    assert recorder.trace is None
    assert recorder.stops == 0


def test_every_compilation_is_counted_beyond_those_of_which_torch_keeps_a_record():
    def double(x):
        return 2 * x

    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    torch._dynamo.utils.set_compilation_metrics_limit(2)
    recording.keep_compilations()

    call = torch.compile(double, backend="eager", dynamic=False)
    for size in range(2, 7):
        call(torch.ones(size))

    assert recording.compile_facts().recompiles == 4


def test_a_stop_ends_the_process_also_where_those_below_it_cannot_be_ended(recorder, monkeypatch):
    def fail():
        raise ValueError

    def end(code):
        raise SystemExit(code)

    monkeypatch.setattr(recorder, "write", lambda why: None)
    monkeypatch.setattr(recording, "kill_own_descendants", fail)
    monkeypatch.setattr(os, "_exit", end)

    with pytest.raises(SystemExit):
        recorder.finish("done")
