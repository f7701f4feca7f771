"""What fails on the one device leaves its reason and all that was measured."""

import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks import ladder, run_gpu
from benchmarks.bench import MOST_SAID, Bench, brief
from benchmarks.stage_process import command_for
from benchmarks.stages import Stage
from flatout.records.machine import Device
from flatout.records.recipe import Recipe
from flatout.records.trial import Applied, Outcome, Trial, Workload
from flatout.workflow.tune import TuneOptions
from tests.benchmarks.made_up import BF16, a_machine, a_profile

RUNGS = {rung.name: rung for rung in ladder.RUNGS}
H200 = a_machine("cuda", "NVIDIA H200")


def trained_on(kind):
    return Trial(
        recipe=Recipe(),
        outcome=Outcome.OK,
        profile=replace(a_profile(), device_kind=kind),
        details={"load": {}},
    )


@pytest.fixture
def noted():
    return []


@pytest.fixture
def bench(tmp_path, noted):
    return Bench(machine=a_machine(), work=tmp_path, say=lambda line: None, note=noted.append)


def test_a_trial_in_brief_keeps_what_went_wrong():
    refused = Applied(technique="bf16_autocast", status="not_applicable", why="no bf16")
    trial = Trial(
        recipe=Recipe(choices=(BF16,)),
        outcome=Outcome.CRASH,
        message="RuntimeError: lost",
        traceback="x" * 5_000 + "the end",
        applied=(refused, Applied(technique="other", status="applied")),
        details={"errors": ["a probe failed"]},
    )

    found = brief(trial)

    assert found["traceback"] == trial.traceback[-MOST_SAID:]
    assert found["errors"] == ["a probe failed"]
    assert [lever["why"] for lever in found["not_applied"]] == ["no bf16"]


def test_a_script_that_fails_is_told_with_its_traceback_and_its_trial(bench, noted, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("def build():\n    raise ValueError('no such layer')\n\nbuild()\n")
    workload = Workload(target=str(script), folder=tmp_path)
    options = TuneOptions(out=tmp_path / "out", budget_s=60.0, accepts_load=True)

    with pytest.raises(ladder.BaselineTracebackError) as failed:
        ladder.tune_noted(workload, options, bench)

    first, *rest = str(failed.value).splitlines()
    assert first.startswith("the unchanged script did not give a measurement")
    assert any("in build" in line for line in rest)
    (trial,) = noted[-1]["trials"]
    assert "no such layer" in trial["traceback"]


def test_a_baseline_beside_the_device_ends_the_tuning_at_once(bench, tmp_path):
    runs = []

    def runner(workload, recipe, machine, options):
        runs.append(recipe)
        trial = trained_on("cpu")
        ladder.check_device(trial, machine)
        return trial

    workload = Workload(target="train.py", folder=tmp_path)
    options = TuneOptions(out=tmp_path / "out", runner=runner)

    with pytest.raises(ladder.WrongDeviceError, match=r"trained on cpu .* not on NVIDIA H200"):
        ladder.tune_noted(workload, options, replace(bench, machine=H200))

    assert len(runs) == 1


def test_where_a_script_trained_is_asked_of_every_trial_of_the_suite(bench, monkeypatch):
    asked = []

    def stopped(workload, options, tell, machine):
        asked.append(options.runner)
        raise KeyboardInterrupt

    monkeypatch.setattr(ladder, "tune", stopped)
    workload = SimpleNamespace(folder=bench.work / "slow_compute")

    for work in (
        lambda: ladder.tuned(60.0, bench, RUNGS["gpt2"]),
        lambda: run_gpu._tune(60.0, bench, workload),
    ):
        with pytest.raises(KeyboardInterrupt):
            work()

    assert asked == [ladder.run_on_device] * 2


def test_a_script_on_the_device_or_on_a_machine_without_one_is_right():
    ladder.check_device(trained_on("cuda"), H200)
    ladder.check_device(trained_on("cpu"), a_machine())
    ladder.check_device(replace(trained_on("cpu"), profile=None), H200)


def test_a_framework_that_fails_leaves_what_it_said(tmp_path, monkeypatch):
    (tmp_path / "framework_defaults.py").write_text(
        "import sys\nsys.exit('Traceback:\\n  in train\\nlost the device')\n"
    )
    monkeypatch.setattr(ladder, "SCRIPTS", tmp_path)

    row = ladder._peer("transformers", RUNGS["gpt2"], 60.0, smoke=True)

    assert row == {
        "why": "lost the device",
        "stderr": "Traceback:\n  in train\nlost the device\n",
    }


def test_there_is_a_record_before_the_first_stage(bench, tmp_path):
    seen = []

    def look(_):
        seen.extend(path.name for path in (tmp_path / "out").glob("*/*"))
        return {"installed": [], "doctor": []}

    stages = [Stage(name="facts", work=look, most_s=9.0)]

    run_gpu.run_all(bench, stages, tmp_path / "out", [], total_s=60.0)

    assert {"README.md", "result.json", "env.json", "log.txt"} <= set(seen)


def test_a_record_that_cannot_be_written_costs_no_stage(bench, tmp_path):
    (tmp_path / "out").write_text("in the way")
    stages = [Stage(name="facts", work=lambda _: {"installed": [], "doctor": []}, most_s=9.0)]

    found = run_gpu.run_all(bench, stages, tmp_path / "out", [], total_s=60.0)

    assert found["facts"]["status"] == "done"


def reader(*, driver, torch):
    """Return a reading of the machine: what the driver tells, and what torch sees."""
    return lambda *, torch_=torch, **asked: torch_ if asked["torch"] else driver


@pytest.mark.parametrize("stage", ["ladder gpt2", "facts"])
def test_a_stage_asks_torch_where_the_driver_tells_of_no_device(stage, monkeypatch):
    monkeypatch.setattr(run_gpu, "read_machine", reader(driver=a_machine(), torch=H200))

    assert run_gpu.machine_for(stage, smoke=False) is H200


def test_a_stage_without_the_device_does_not_tune_as_on_a_cpu(monkeypatch):
    none = replace(a_machine(), facts={"torch_trouble": "driver too old"})
    monkeypatch.setattr(run_gpu, "read_machine", reader(driver=none, torch=none))

    with pytest.raises(RuntimeError, match="gone: driver too old"):
        run_gpu.machine_for("ladder gpt2", smoke=False)
    assert run_gpu.machine_for("ladder gpt2", smoke=True) is none


def test_what_the_driver_tells_is_believed(monkeypatch):
    other = replace(H200, device=Device(kind="cuda", name="other", memory_bytes=1))
    monkeypatch.setattr(run_gpu, "read_machine", reader(driver=H200, torch=other))

    assert run_gpu.machine_for("ladder gpt2", smoke=False) is H200


def test_the_start_of_a_stage_is_part_of_its_time(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(run_gpu, "play_inside", lambda stage, seconds, path: given.append(seconds))
    command = command_for("facts", tmp_path, 1_000.0, tmp_path / "x.json", smoke=True)
    words = command[command.index("--alone") :]
    words[words.index("--began") + 1] = str(time.monotonic() - 600.0)

    assert run_gpu.main(words) == 0

    assert 1.0 <= given[0] <= 400.0
