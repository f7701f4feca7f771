"""The suites for a GPU: what they conclude from what they saw, and their smoke forms on the CPU."""

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import gpu_clocks, gpu_commands, gpu_guard
from benchmarks.bench import Bench
from benchmarks.suites import overhead
from flatout.hardware.machine import read_machine
from flatout.records.profile import ModelFacts, OptimizerFacts
from flatout.records.readings import TraceSummary
from tests.techniques.facts import gpu, loader, machine, profile

TRUE = {"step_ms": 10.0, "phases_ms": {"forward": 4.0, "backward": 5.0, "optimizer": 0.2}}
LAUNCHES, PRODUCTS = gpu_clocks.JOBS


@pytest.fixture
def bench(tmp_path):
    return Bench(machine=read_machine(torch=False), work=tmp_path, say=lambda _: None)


def on_device(step_ms=10.0, trace_ms=10.5, **phases):
    found = profile(kind="cuda", phases_ms={"forward": 4.0, "backward": 5.0} | phases)
    spread = replace(found.step_ms, median=step_ms)
    trace = TraceSummary(steps=3, step_ms=trace_ms)
    return replace(found, step_ms=spread, trace=trace)


@pytest.mark.parametrize(
    ("seen", "holds"),
    [
        (on_device(), True),
        (on_device(step_ms=10.4), False),
        (on_device(backward=6.0), False),
        (on_device(trace_ms=13.0), False),
        (replace(on_device(), trace=None), False),
        (replace(on_device(), device_kind="cpu"), False),
    ],
)
def test_times_agree_only_with_the_wall_clock_on_the_device(seen, holds):
    row = gpu_clocks.compared_clocks(PRODUCTS, TRUE, seen)

    assert row["holds"] is holds
    both = {"rows": [row, row | {"job": "launches"}]}
    assert gpu_clocks.clocks_agree(both) is holds
    assert not gpu_clocks.clocks_agree({"rows": [row]})


def test_phases_of_a_step_that_launches_bind_are_not_compared():
    row = gpu_clocks.compared_clocks(LAUNCHES, TRUE, on_device(backward=9.0))

    assert set(row["off"]) == {"step", "trace"}
    assert row["holds"]


def test_what_reading_adds_is_found_in_neighbouring_blocks():
    blocks = [(number % 2 == 0, float(number), number + 1.0) for number in range(16)]
    ends, now = [], 0.0
    while now < 16.0:
        is_on = int(now) % 2 == 0
        now += 0.00525 if is_on else 0.005
        ends.append(now)

    found = gpu_clocks.added_by_sampling(blocks, ends)

    assert found["pairs"] == 8
    assert found["ratio"] == pytest.approx(1.05, abs=0.005)
    assert not gpu_clocks.sampling_is_cheap(found | {"device": "cuda"})


def test_reading_is_cheap_only_on_a_device_and_from_enough_pairs():
    found = {"pairs": 8, "device": "cuda", "interval": [0.99, 1.005], "ratio": 1.0, "step_ms": 3.0}

    assert gpu_clocks.sampling_is_cheap(found)
    for change in ({"pairs": 3}, {"device": "cpu"}, {"interval": [0.99, 1.02]}):
        assert not gpu_clocks.sampling_is_cheap(found | change)
    assert gpu_clocks.added_words(found) == "+0.0% of 3.00 ms (-1.0% to +0.5%, n=8)"


def test_known_loads_are_played_and_without_a_driver_nothing_is_right(bench):
    found = gpu_clocks.counters(600.0, bench, smoke=True)

    assert [row["load"] for row in found["rows"]] == ["idle", "small", "product"]
    assert not gpu_clocks.counters_are_right(found)
    right = [row | {"holds": True} for row in found["rows"]]
    assert gpu_clocks.counters_are_right({"rows": right})
    assert not gpu_clocks.counters_are_right({"rows": right[:2]})


def test_the_wall_clock_times_an_ordinary_script(bench):
    workload = LAUNCHES.workload(bench, smoke=True)

    found = gpu_clocks.by_wall_clock(workload, bench.work / "t.json", 600.0, smoke=True)

    assert found["step_ms"] > 0
    assert all(found["phases_ms"][name] > 0 for name in gpu_clocks.PHASES_SEEN)
    assert len(found["ends_s"]) == 20 + 2 * gpu_clocks.SMOKE_STEPS


def row(became="applied", guard="same", *, is_offered=True):
    return {"became": became, "guard": guard, "is_offered": is_offered}


@pytest.mark.parametrize(
    ("change", "reached"),
    [
        ({}, True),
        ({"rows": [row(), row("not_applicable", "skipped", is_offered=False)]}, True),
        ({"rows": [row("not_applicable", "skipped")]}, False),
        ({"rows": [row("crashed", "not_compared")]}, False),
        ({"rows": [row(guard="rejected")]}, False),
        ({"rows": [row(guard="not_compared")]}, False),
        ({"rows": []}, False),
        ({"missed": ["tf32"]}, False),
        ({"subjects": [{"subject": "decoder", "message": "x"}]}, False),
    ],
)
def test_a_sweep_holds_when_all_were_tried_and_passed(change, reached):
    found = {"rows": [row()], "missed": [], "subjects": []} | change

    assert gpu_guard.sweep_is_reached(found) is reached


def test_what_only_a_gpu_offers_is_tried_first_and_every_technique_once():
    model = ModelFacts(
        name="GPT", parameters=1000, parameter_bytes=4000, dtypes=("float32",), modules=9
    )
    seen = profile(kind="cuda", models=(model,), optimizers=(ADAM,), loaders=(loader(),))
    ground = SimpleNamespace(subject=gpu_guard.SUBJECTS[0], profile=seen)
    device = gpu()

    tasks = gpu_guard.tasks_for({"decoder": ground}, machine(device=device, devices=(device,)))

    first = [task.choice.technique for task in tasks if task.is_first]
    assert len(first) == len(set(first))
    assert {"tf32", "fused_optimizer", "expandable_segments", "pinned_memory"} <= set(first)
    assert "data_parallel" not in first
    assert first.index("tf32") < first.index("fused_optimizer")
    later = [task.is_first for task in tasks]
    assert later == sorted(later, reverse=True)


ADAM = OptimizerFacts(name="AdamW", parameters=1000, has_fused_option=True, parameter_tensors=160)


@pytest.mark.parametrize(
    ("last", "reached"),
    [(["within"], True), ([], False), (["rejected"], False), (["not_compared"], False)],
)
def test_each_script_has_to_be_judged_as_often_as_planned(last, reached):
    rows = [
        {
            "script": name,
            "checks": [
                {"status": status, "why": "", "recipe": ""}
                for status in ["same"] * (gpu_guard.REPEATS + len(recipes) - 1) + last
            ],
            "why": "",
        }
        for name, recipes in gpu_guard.HONEST.items()
    ]

    assert gpu_guard.aa_is_reached({"rows": rows}) is reached
    assert not gpu_guard.aa_is_reached({"rows": rows[:1]})


def test_a_command_that_fails_or_says_something_else_is_told(bench):
    items = (
        gpu_commands.Command(name="one", words=("plan", "no_such.py"), seconds=60.0),
        gpu_commands.Command(name="two", words=("--version",), seconds=60.0, says="no such word"),
        gpu_commands.Command(name="three", words=("--version",), seconds=60.0, says="flatout"),
    )

    rows = gpu_commands.play_all(items, 200.0, bench)

    assert [item["holds"] for item in rows] == [False, False, True]
    assert rows[0]["why"].startswith("exit code 2: ")
    assert not gpu_commands.all_hold({"rows": rows})
    assert gpu_commands.all_hold({"rows": rows[2:]})
    assert gpu_commands.play_all(items[:1], 1.0, bench)[0]["why"] == "no time left"


def test_tests_hold_when_every_one_was_reached_and_passed():
    said = "collecting ... 4 items / 2 deselected / 2 selected\na.py::t PASSED [1%]\n"
    half = gpu_commands.counted(said)
    whole = gpu_commands.counted(f"{said}a.py::u[x y] PASSED [2%]\n")
    failed = gpu_commands.counted(f"{said}a.py::u[x y] FAILED [2%]\n")

    assert not gpu_commands.tests_pass(half | {"is_late": False})
    assert gpu_commands.tests_pass(whole | {"is_late": False})
    assert not gpu_commands.tests_pass(whole | {"is_late": True})
    assert not gpu_commands.tests_pass(failed | {"is_late": False})
    assert gpu_commands.tests_words(failed | {"is_late": False}).endswith("1 failed; a.py::u[x y]")


def test_the_tests_for_a_gpu_are_run_and_counted(bench):
    found = gpu_commands.device_tests(200.0, bench, smoke=True)

    assert found["failed"] == []
    assert found["asked"] == found["passed"] + found["skipped"] > 0
    assert gpu_commands.tests_pass(found)


def test_a_wall_clock_that_is_interrupted_leaves_the_moments_of_its_steps(tmp_path):
    result = tmp_path / "t.json"
    words = [str(gpu_clocks.SCRIPTS / "wall_clock.py"), str(result), "1000000"]
    script = str(gpu_clocks.SCRIPTS / "steps.py")
    command = [sys.executable, *words, script, "--width", "8", "--layers", "1", "--steps", "30"]

    subprocess.run(command, check=False, timeout=120, capture_output=True)

    assert len(json.loads(result.read_text())["ends_s"]) == 30


@pytest.mark.slow
@pytest.mark.smoke
def test_listening_is_switched_while_a_script_trains(bench):
    job = overhead.Job(
        name="launches",
        target=gpu_clocks.SCRIPTS / "steps.py",
        arguments=(*LAUNCHES.smoke[:-1], "200"),
        block=4,
        most_share=1.0,
    )

    seen = overhead.run_once(bench, job, seed=0)

    assert {is_on for is_on, _ in seen["blocks"]} == {True, False}
    assert seen["changes"]["on"] > 0 == seen["changes"]["off"]


@pytest.mark.slow
def test_a_technique_is_swept_and_judged(bench):
    found = gpu_guard.sweep(600.0, bench, smoke=True)

    became = {one["technique"]: one["became"] for one in found["rows"]}
    assert found["subjects"] == []
    assert became["fused_optimizer"] == "applied"
    assert became["tf32"] == "not_applicable"
    assert gpu_guard.sweep_is_reached(found), gpu_guard.sweep_words(found)


@pytest.mark.slow
def test_unchanged_scripts_are_judged_as_such(bench):
    found = gpu_guard.aa(1800.0, bench, smoke=True)

    statuses = [[check["status"] for check in one["checks"]] for one in found["rows"]]
    assert statuses == [["same"]] * 3, gpu_guard.aa_words(found)


@pytest.mark.slow
def test_a_run_with_a_recipe_ends_as_the_plain_one(bench):
    found = gpu_commands.with_recipe(600.0, bench, smoke=True)

    assert found["holds"], found["why"]


def test_runs_without_a_loss_show_nothing():
    run = {"losses": [], "checkpoints": ["a"], "step_ms": 1.0}

    assert gpu_commands.judged_runs(run, run)["why"].startswith("0 losses")
