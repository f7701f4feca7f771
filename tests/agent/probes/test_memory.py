import functools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from flatout.analysis.memory import memory_story
from tests.support.probe_runs import SCRIPTS, line_of, seen_in

pytestmark = pytest.mark.slow

OBSERVED = range(5, 13)
"""Steps that the probe observes: after three of warm-up and two to settle, eight."""


@functools.cache
def steady():
    return seen_in("steady_memory.py", "memory")


@functools.cache
def truth(folder):
    """Return the largest total that torch's own trace of the whole run shows in each phase."""
    trace = Path(folder) / "trace.json"
    script = str(SCRIPTS / "steady_memory.py")
    subprocess.run(
        [sys.executable, script, "--truth", str(trace), "--steps", "13"], check=True, timeout=120
    )
    events = json.loads(trace.read_text())["traceEvents"]
    parts = [
        (event["ts"], event["ts"] + event["dur"], *event["name"].split(":")[1:])
        for event in events
        if event["name"].startswith("part:") and event["ph"] == "X"
    ]
    highest = {}
    for event in events:
        if event["name"] != "[memory]":
            continue
        for begin, end, step, phase in parts:
            if begin <= event["ts"] <= end and int(step) in OBSERVED:
                highest[phase] = max(highest.get(phase, 0), event["args"]["Total Allocated"])
    return highest


@pytest.mark.parametrize("phase", ["forward", "backward", "optimizer", "other"])
def test_the_peak_of_each_phase_is_the_profilers_own(phase, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()

    expected = truth(str(folder))[phase]

    assert steady()["by_phase"][phase] == pytest.approx(expected, rel=0.005)


def test_the_largest_tensor_at_the_peak_is_named_with_the_line_that_made_it():
    largest = steady()["largest"][0]

    assert largest["shape"] == [16, 128, 32, 32]
    assert largest["bytes"] == 16 * 128 * 32 * 32 * 4
    assert largest["dtype"] == "torch.float32"
    assert largest["line"] == line_of("steady_memory.py", "# the largest tensor")
    assert largest["module"] == "Net"


def test_parameters_and_optimizer_state_are_told_apart():
    kinds = {item["kind"] for item in steady()["largest"]}

    assert {"parameter", "optimizer state"} <= kinds


def test_what_is_alive_at_the_peak_adds_up_to_it():
    seen = steady()

    assert sum(seen["by_module"].values()) == seen["peak_bytes"]


def test_steady_training_leaves_nothing_behind():
    assert len(set(steady()["ends"])) == 1
    assert steady()["grown_by_line"] == {}
    assert steady()["kept_graph_names"] == []


def leak():
    return memory_story(seen_in("leaking.py", "memory"))


def test_a_leak_is_measured_and_named_by_the_line_that_made_it():
    assert leak().leak_bytes_per_step == pytest.approx(400_000, rel=0.05)
    (line, bytes_per_step), *_ = leak().leak_by_line.items()
    assert line == line_of("leaking.py", "# the leak")
    assert bytes_per_step == pytest.approx(400_000, rel=0.05)


def test_a_loss_that_is_kept_with_its_graph_is_named():
    assert leak().kept_graph_nodes_per_step > 5
    assert leak().kept_graph_names == ("total",)
