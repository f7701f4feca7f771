"""A stage in a process of its own: what hangs, dies or says nothing there is told here."""

import json
import sys
import textwrap
import time

import psutil
import pytest

from benchmarks import run_gpu
from benchmarks.bench import Bench
from benchmarks.gpu_record import record_of
from benchmarks.stage_process import GRACE_S, LAST_S, note_to, play_inside, play_outside
from benchmarks.stages import Stage, run_stages
from tests.benchmarks.made_up import a_machine


@pytest.fixture
def played(tmp_path):
    """Play a stage whose process runs this code; `path` is where it writes."""

    def play(code, seconds=20.0, grace_s=10.0):
        path = tmp_path / "stage.json"
        source = "from pathlib import Path\nfrom benchmarks.stage_process import note_to\n"
        source += f"path = Path({str(path)!r})\n" + textwrap.dedent(code)
        lines = []
        found = play_outside(
            [sys.executable, "-c", source], seconds, path, lines.append, grace_s=grace_s
        )
        return found, lines

    return play


def test_a_stage_gives_what_its_process_wrote_and_passes_on_what_it_said(played):
    found, lines = played("""
        from benchmarks.stage_process import play_inside
        from benchmarks.stages import Stage
        def work(seconds):
            print("under way")
            return {"given_s": seconds}
        play_inside(Stage(name="x", work=work, most_s=9.0), 7.0, path)
    """)

    assert found == {"status": "done", "result": {"given_s": 7.0}}
    assert lines == ["  under way"]


@pytest.mark.chaos
def test_a_stage_that_dies_leaves_what_it_had_and_what_killed_it(played):
    found, _ = played("""
        import os, signal
        note_to(path)({"rows": [1, 2]})
        print("the device is lost", flush=True)
        os.kill(os.getpid(), signal.SIGSEGV)
    """)

    assert found["status"] == "failed"
    assert found["result"] == {"rows": [1, 2]}
    assert "signal 11" in found["why"]
    assert "the device is lost" in found["traceback"]


@pytest.mark.chaos
def test_a_stage_that_fails_or_hears_its_alarm_leaves_what_it_noted(tmp_path):
    path = tmp_path / "stage.json"
    note = note_to(path)

    def broken(_):
        note({"trials": [1]})
        raise RuntimeError("no device")

    def endless(_):
        note({"trials": [1, 2]})
        while True:
            time.sleep(0.01)

    play_inside(Stage(name="x", work=broken, most_s=9.0), 9.0, path)
    failed = json.loads(path.read_text())
    play_inside(Stage(name="x", work=endless, most_s=0.2), 0.2, path)
    late = json.loads(path.read_text())

    assert (failed["why"], failed["result"]) == ("RuntimeError: no device", {"trials": [1]})
    assert (late["why"], late["result"]) == ("not done within 0 s", {"trials": [1, 2]})


def test_the_grace_is_enough_for_a_trial_to_end_and_all_fits_into_one_call():
    assert GRACE_S >= 15.0 + LAST_S
    assert run_gpu.TOTAL_S + GRACE_S + 2 * LAST_S < 9 * 60


@pytest.mark.chaos
def test_a_stage_that_hears_nothing_is_killed_with_what_it_started(played, tmp_path):
    found, _ = played(
        f"""
        import pathlib, signal, subprocess, sys, time
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        note_to(path)({{"rows": [1]}})
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        pathlib.Path("{tmp_path}/child").write_text(str(child.pid))
        time.sleep(600)
        """,
        seconds=1.0,
        grace_s=2.0,
    )
    assert found["why"] == "killed: it did not end after its 1 s"
    assert found["result"] == {"rows": [1]}
    child = int((tmp_path / "child").read_text())
    for _ in range(600):
        if not psutil.pid_exists(child):
            break
        time.sleep(0.1)
    assert not psutil.pid_exists(child)


def test_a_process_that_cannot_even_begin_says_why(played):
    found, _ = played("import no_such_package")

    assert found["why"] == "ended with exit code 1"
    assert "no_such_package" in found["traceback"]


def test_a_result_of_the_stage_before_is_not_taken_for_this_one(played, tmp_path):
    play_inside(
        Stage(name="x", work=lambda _: {"old": 1}, most_s=1.0), 1.0, tmp_path / "stage.json"
    )

    found, _ = played("raise SystemExit(3)")

    assert "result" not in found


def test_what_is_not_installed_costs_its_own_stage_only():
    stages = [
        Stage(name="one", work=lambda _: {}, most_s=5.0, packages=("no_such_package", "json")),
        Stage(name="two", work=lambda _: {"x": 1}, most_s=5.0),
    ]

    results = run_stages(stages, lambda _: None, total_s=60.0)

    assert results["one"]["why"] == "not installed: no_such_package"
    assert results["two"]["result"] == {"x": 1}


def test_the_record_shows_what_a_stage_had_before_it_died(tmp_path):
    note = note_to(tmp_path / "stage.json")
    note({"rows": [{"script": "gpt2", "framework": "lightning", "why": "slow"}]})
    found = {"status": "failed", "why": "ended by signal 11", "took_s": 3.0}
    found["result"] = {"rows": [{"script": "gpt2", "framework": "lightning", "why": "slow"}]}

    record = record_of({"peers": found}, part="peers")

    assert record.table[1][1] == "failed: ended by signal 11; so far gpt2 lightning slow"
    assert record.theme == "gpu_peers"


def test_the_record_tells_how_many_trials_a_tuning_had_before_it_died():
    found = {"status": "failed", "why": "killed", "took_s": 3.0, "result": {"trials": [{}, {}]}}

    record = record_of({"ladder gpt2": found, "tune starved_images": found}, part="compute")

    assert [row[1] for row in record.table[1:]] == ["failed: killed; so far 2 trials"] * 2


@pytest.mark.slow
def test_a_stage_of_the_program_is_played_apart(tmp_path):
    lines = []
    bench = Bench(machine=a_machine(), work=tmp_path, say=lines.append)
    stages = run_gpu.chosen(run_gpu.stages_of(bench, run_gpu.SMOKE), "gemm", ())

    found = run_gpu.play_apart(stages[0], 300.0, bench=bench, smoke=True)

    assert found["status"] == "done"
    assert [row["case"] for row in found["result"]["rows"]][:2] == ["plain 64", "plain 96"]
    assert any("plain 64" in line for line in lines)
