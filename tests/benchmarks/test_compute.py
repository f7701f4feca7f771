"""The compute stages of the GPU suite, on the CPU with tiny sizes: they must not fail for silly
reasons on the one device they are for."""

import json
import subprocess
import sys

import pytest

from benchmarks import gemm, ladder, run_gpu
from benchmarks.bench import Bench
from benchmarks.gpu_record import holds
from benchmarks.stages import Stage
from tests.benchmarks.made_up import BF16, a_machine, an_ablation

RUNGS = {rung.name: rung for rung in ladder.RUNGS}


@pytest.fixture
def bench(tmp_path):
    return Bench(machine=a_machine(), work=tmp_path, say=lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNGS)
def test_each_naive_script_trains(name, tmp_path):
    script = ladder.SCRIPTS / f"{RUNGS[name].script}.py"

    done = subprocess.run(
        [sys.executable, str(script), *ladder.SMOKE[name], "--steps", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr[-2_000:]


@pytest.mark.slow
@pytest.mark.parametrize("framework", ladder.FRAMEWORKS)
def test_a_naive_script_s_model_trains_under_a_framework(framework, monkeypatch, bench):
    pytest.importorskip(framework)
    monkeypatch.setattr(ladder, "FRAMEWORKS", (framework,))
    monkeypatch.setattr(ladder, "RUNGS", ladder.RUNGS[:1])
    monkeypatch.setattr(ladder, "PEER_S", 240.0)  # a busy machine may take minutes to import them

    (row,) = ladder.peers(300.0, bench, smoke=True)["rows"]

    assert "why" not in row
    assert row["per_s"] > 0
    assert len(row["steps_ms"]) >= ladder.PEER_STEPS - 10


def test_a_framework_that_is_not_there_is_told(monkeypatch, bench):
    monkeypatch.setattr(ladder, "FRAMEWORKS", ("no_such_framework",))

    rows = ladder.peers(10.0, bench)["rows"]

    assert {row["why"] for row in rows} == {"not installed"}
    assert "gpt2 no_such_framework not installed" in ladder.peer_words(rows)


def test_what_a_tuning_reached_is_in_the_rung_s_unit():
    found = ladder.reached(an_ablation(BF16, ratio=2.0), RUNGS["gpt2"], per_sample=1024)

    assert found["ratio"] == 2.0
    assert found["naive_per_s"] == an_ablation().baseline.samples_per_s * 1024
    assert "goal 470000 (bf16_autocast)" in ladder.rung_words(found)


@pytest.mark.parametrize("case", gemm.cases((48, 64)), ids=lambda case: case.name)
def test_products_of_both_sides_agree(case, monkeypatch):
    monkeypatch.setattr(gemm, "ROUNDS", 2)
    monkeypatch.setattr(gemm, "BLOCK_S", 1e-4)

    row = gemm.compared(case)

    assert set(row["ours"]) == {"tiled", "persistent"}
    assert all(side["off"] < 2**-6 for side in row["ours"].values())
    assert all(side["tflops"] > 0 for side in (*row["ours"].values(), *row["theirs"].values()))
    assert json.dumps(row)
    assert case.name in gemm.words(row)


def test_plain_operations_never_count_as_our_kernel():
    sides = {"ours": {"tiled": {"tflops": 9.0}}, "theirs": {"torch": {"tflops": 9.0}}}

    assert gemm.share_of_cublas({"is_kernel": False, **sides}) == 0.0
    assert gemm.share_of_cublas({"is_kernel": True, **sides}) == 1.0


def test_without_time_products_are_told_to_be_missed(bench):
    found = gemm.run(-1.0, bench, sizes=(16,))

    assert found["rows"] == []
    assert "plain 16" in found["missed"]


def entry(**result):
    return {"status": "done", "took_s": 1.0, "result": result}


def products(rate):
    row = {"case": "plain 16", "is_kernel": True, "ours": {"tiled": {"tflops": rate}}}
    return entry(rows=[row | {"theirs": {"torch": {"tflops": 100.0}}}], missed=[])


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({"gemm": products(96.0)}, True),
        ({"gemm": products(90.0)}, False),
        ({"gemm": entry(rows=[], missed=["plain 16"])}, False),
        ({"ladder gpt2": entry(goal_per_s=470_000, tuned_per_s=480_000)}, True),
        ({"ladder gpt2": entry(goal_per_s=470_000, tuned_per_s=400_000)}, False),
        ({"ladder cifar": entry(goal_per_s=None, tuned_per_s=1)}, True),
        ({"ladder cifar": {"status": "failed", "took_s": 1.0, "why": "x"}}, False),
    ],
)
def test_the_compute_stages_hold_when_they_reach_their_goals(results, expected):
    assert holds(results) is expected


def test_stages_are_chosen_by_set_and_by_name():
    names = ("facts", "tune x", "gemm", "ladder gpt2", "ladder vit", "peers")
    stages = [Stage(name=name, work=lambda _: {}, most_s=1.0) for name in names]

    def found(*given):
        return [stage.name for stage in run_gpu.chosen(stages, *given)]

    assert found("all", ()) == list(names)
    assert found("base", ()) == ["facts", "tune x"]
    assert found("compute", ("gemm", "ladder gpt2")) == ["gemm", "ladder gpt2"]


@pytest.mark.parametrize(("part", "count"), [("base", 10), ("compute", len(ladder.RUNGS) + 2)])
def test_the_stages_of_a_part_fit_into_one_lease(bench, part, count):
    stages = run_gpu.chosen(run_gpu.stages_of(bench, run_gpu.Sizes()), part, ())

    assert sum(stage.most_s for stage in stages) <= run_gpu.TOTAL_S
    assert len(stages) == count
