"""What the watch asks of a device that is not here, and what it leaves as the script has it."""

import json
from types import SimpleNamespace

import pytest
import torch

from flatout.agent.measuring import memory_watch
from flatout.agent.measuring.memory_watch import MemoryWatch, components_of
from flatout.agent.session import Session
from flatout.records.trial_spec import TrialSpec

MIB = 2**20
PLACE = torch.device("cuda:1")


@pytest.fixture
def device(monkeypatch):
    """A second GPU with the model, while the first is the current one; notes what is reset."""
    reset = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *at: reset.append(at))
    for name, found in (("memory_allocated", 4), ("max_memory_allocated", 8)):
        monkeypatch.setattr(torch.cuda, name, {PLACE: found * MIB}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", {PLACE: 16 * MIB}.__getitem__)
    return reset


def session_on_device():
    session = Session(TrialSpec())
    root = SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=PLACE)]))
    session.add_root(root)
    return session


def test_a_run_with_a_plan_leaves_the_scripts_peaks_alone(tmp_path, device, capsys):
    plan = {"device": "an H200", "allocated": 4 * MIB, "reserved": 16 * MIB}
    watch = MemoryWatch(session_on_device(), tmp_path, plan)

    watch.begin_step()
    watch.compare(2)

    assert device == []
    assert capsys.readouterr().err == (
        "flatout: memory up to step 2: allocated 8.0 MiB, planned 4.0 MiB (+100.0 %); "
        "reserved 16.0 MiB, planned 16.0 MiB (+0.0 %) for an H200\n"
    )


def test_components_are_those_of_the_models_device(device, monkeypatch):
    session = session_on_device()
    monkeypatch.setattr("flatout.agent.measuring.memory_watch._known", lambda _: iter(()))

    assert components_of(session) == {"activations and temporaries": 4 * MIB}


def test_of_a_model_on_two_devices_what_both_hold_is_told_apart(device, monkeypatch):
    other = torch.device("cuda:0")
    held = {PLACE: 4 * MIB, other: 6 * MIB}
    monkeypatch.setattr(torch.cuda, "memory_allocated", held.__getitem__)
    monkeypatch.setattr("flatout.agent.measuring.memory_watch._known", lambda _: iter(()))
    session = session_on_device()
    session.add_root(SimpleNamespace(parameters=lambda: iter([SimpleNamespace(device=other)])))

    assert components_of(session) == {"activations and temporaries": 10 * MIB}


def test_memory_that_ran_out_late_is_of_that_step_and_grew_since_the_latest_look(
    tmp_path, monkeypatch
):
    session = Session(TrialSpec(folder=str(tmp_path), mode="run"))
    monkeypatch.setattr(memory_watch, "components_of", lambda *_: {"buffers": session.made_steps})
    watch = MemoryWatch(session, tmp_path)
    session.on("segment", watch.saw_segment)

    for _ in range(8):
        session.end_segment(0)
    watch.failed("out of memory", None)

    (noted,) = map(json.loads, (path.read_text() for path in tmp_path.glob("oom-*.json")))
    assert (noted["step"], noted["components"]) == (9, {"buffers": 8})
    assert (noted["since"], noted["before"]) == (3, {"buffers": 3})


class Built:
    """Stands for an optimizer."""


@pytest.mark.parametrize(
    ("whos", "num_built", "begun", "compared"),
    [
        ([0] * 6, 1, 1, (2, "of step 2")),
        ([0, 1] * 6, 2, 2, (4, "of step 2")),
        ([0, 0, 0, 0, 0, 1] * 6, 2, 6, (12, "of step 2")),
        ([0] * 16, 2, 10, (11, "of step 11")),
    ],
    ids=["one optimizer", "in turns", "five of a critic", "a second one that never steps"],
)
def test_a_whole_step_is_held_against_the_plan(
    tmp_path, monkeypatch, whos, num_built, begun, compared
):
    session = Session(TrialSpec(mode="run"))
    built = [Built() for _ in range(num_built)]
    for each in built:
        session.add_optimizer(each)
    watch = MemoryWatch(session, tmp_path, {"device": "an H200", "allocated": MIB})
    seen = []
    monkeypatch.setattr(memory_watch, "components_of", lambda *_: {})
    monkeypatch.setattr(watch, "begin_step", lambda: seen.append(sum(session.counts.values())))
    monkeypatch.setattr(watch, "measured_on_cpu", lambda: {"allocated": MIB})
    monkeypatch.setattr(
        memory_watch,
        "describe_comparison",
        lambda *said: seen.append((sum(session.counts.values()), said[-1])) or "",
    )
    session.on("segment", watch.saw_segment)

    for who in whos:
        session.end_segment(who)

    assert seen == [begun, compared]
    assert session.listeners["segment"] == []
    assert session.errors == []
