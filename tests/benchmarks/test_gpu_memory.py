"""The memory stage's own judgement, on made-up results, and its cases on the CPU."""

import json
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_memory
from flatout.hardware.catalogue import find_gpu
from flatout.planner import workspaces
from flatout.planner.workspaces import find_calibration


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(gpu_memory.SCRIPTS))


def row(allocated, reserved, *, exact=True):
    return {
        "case": "made_up-4",
        "errors": {way: {"allocated": allocated, "reserved": reserved} for way in gpu_memory.WAYS},
        "truth": {"reserved": 2**30, "outside": 500_000_000},
        "simulator": {"is_exact": exact, "error": 0.0},
        "cublas": [32 * 2**20],
    }


def place(tmp_path):
    return gpu_memory.Place(
        work=tmp_path, gpu=find_gpu("h200"), torch="2.11.0", deadline=time.monotonic() + 60
    )


def test_there_are_at_least_24_cases_and_no_two_are_the_same():
    cases = gpu_memory.all_cases()

    assert len(cases) >= 24
    assert len(set(cases)) == len(cases)


def test_goals_hold_by_median_and_by_the_worst():
    found = gpu_memory.summary([row(0.001, 0.005), row(-0.001, 0.02), row(0.009, -0.005)])

    assert found["compared"] == 3
    assert found["simulated"]["allocated"]["holds"]
    assert found["device"]["reserved"]["largest"] == pytest.approx(0.02)
    assert not gpu_memory.summary([row(0.02, 0.0)])["device"]["allocated"]["holds"]


def test_a_case_that_failed_is_told_and_not_counted():
    failed = {"case": "made_up-9", "why": "RuntimeError: out of luck"}

    found = gpu_memory.summary([row(0.0, 0.0), failed])

    assert found["compared"] == 1
    assert gpu_memory.words(failed) == "made_up-9: RuntimeError: out of luck"


def test_the_stage_reads_in_one_line():
    rows = [row(0.001, 0.01), row(0.002, 0.02, exact=False)]
    limited = [{"case": "x", "fits": True, "larger_fits": False}, {"case": "y", "why": "no time"}]

    text = gpu_memory.result_words({"rows": rows, "limited": limited, **gpu_memory.summary(rows)})

    errors = (
        "allocated ({way}) median 0.15%, worst 0.20%; reserved ({way}) median 1.50%, worst 2.00%; "
    )
    assert text == (
        f"{errors.format(way='device')}{errors.format(way='simulated')}simulator exact in 1 of 2; "
        "recommended batch fits in 1 of 4, largest in 1"
    )


def result(*, cases=24, fits=True, rows=None):
    """Return a stage's result with so many cases compared and every recommended batch tried."""
    rows = rows or [row(0.001, 0.005)] * cases
    limited = [{"case": name, "fits": True, "larger_fits": False} for name in gpu_memory.LIMITED]
    limited[-1]["fits"] = fits
    return {"rows": rows, "limited": limited, **gpu_memory.summary(rows)}


def test_the_stage_holds_when_every_case_was_compared_and_every_batch_fits():
    simulated_off = row(0.001, 0.005)
    simulated_off["errors"] = {
        "device": {"allocated": 0.001, "reserved": 0.005},
        "simulated": {"allocated": 0.05, "reserved": 0.005},
    }

    assert gpu_memory.is_reached(result())
    assert not gpu_memory.is_reached(result(cases=1))
    assert not gpu_memory.is_reached(result(fits=False))
    assert not gpu_memory.is_reached(result(rows=[simulated_off] * 24))
    assert not gpu_memory.is_reached({"rows": [], "why": "no CUDA device"})


def test_the_calibration_that_is_written_is_read_back(tmp_path, monkeypatch):
    found = gpu_memory.calibration(place(tmp_path), [row(0.001, 0.02), row(-0.004, 0.0)])
    path = tmp_path / found["file"]
    path.write_text(json.dumps(found["document"]))

    monkeypatch.setattr(workspaces, "FOLDER", tmp_path)

    read = find_calibration(find_gpu("h200"), "2.11.0+cu130")

    assert path.name == "h200-torch-2.11.json"
    assert read.context.bytes == 500_000_000
    assert read.context.source.value == "calibrated"
    assert read.nccl.source.value == "assumed"
    assert read.trace_error == 0.004
    other = find_calibration(find_gpu("h200"), "2.13.0")
    assert other.context.source.value == "assumed"


def test_one_case_that_fails_leaves_the_others(tmp_path):
    def work(_place, case):
        if case[1] == 2:
            raise RuntimeError("boom")
        return {"case": gpu_memory.named(case)}

    found = gpu_memory.side_by_side(place(tmp_path), [("a", 1), ("a", 2)], work)

    assert found == [{"case": "a-1"}, {"case": "a-2", "why": "RuntimeError: boom"}]


def test_the_real_loop_trains_every_kind_of_subject(scripts):
    import memory_case
    import memory_cases

    before = Path(memory_cases.__file__)
    model = memory_case.train(memory_cases.cnn_fp32, 1, device="cpu")

    assert before.parent == gpu_memory.SCRIPTS
    assert all(parameter.grad is None for parameter in model.parameters())
    for name in ("memory_case", "memory_cases"):
        sys.modules.pop(name)


@pytest.mark.slow
@pytest.mark.parametrize("case", gpu_memory.all_cases()[:12], ids=gpu_memory.named)
def test_every_subject_can_be_predicted_without_a_gpu(tmp_path, case):
    found = gpu_memory.predicted(place(tmp_path), case)

    assert found["reserved"] >= found["allocated"] > 0
