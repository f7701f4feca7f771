"""The compute stages of the GPU suite, on the CPU with tiny sizes: they must not fail for silly
reasons on the one device they are for."""

import json
from dataclasses import replace

import pytest

from benchmarks import gemm, ladder, run_gpu
from benchmarks.bench import Bench, calibration
from benchmarks.gpu_record import REACHED, STAGES, WORDS, holds, known, record_of
from benchmarks.stages import Stage
from tests.benchmarks.made_up import BF16, a_machine, an_ablation
from tests.paths import ROOT
from tests.support.programs import python

RUNGS = {rung.name: rung for rung in ladder.RUNGS}


@pytest.fixture
def bench(tmp_path):
    return Bench(machine=a_machine(), work=tmp_path, say=lambda line: None)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNGS)
def test_each_naive_script_trains(name, tmp_path):
    script = ladder.SCRIPTS / f"{RUNGS[name].script}.py"

    done = python([str(script), *ladder.SMOKE[name], "--steps", "3"], cwd=tmp_path)

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
    assert all(step_ms > 0 for step_ms in row["steps_ms"])


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
    sides = (*row["ours"].values(), *row["theirs"].values())
    assert all(side["tflops"] > 0 and side["host_ms"] > 0 for side in sides)
    assert row["timed"] == "plain calls" or "graph" in row["timed"]
    assert json.dumps(row)
    assert case.name in gemm.words(row)


def test_all_sides_are_timed_in_one_way(monkeypatch):
    def captured(call):
        if call is max:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return lambda: call

    monkeypatch.setattr(gemm, "graph_of", captured)
    graphs, both = {"torch": min, "ours": abs}, {"torch": min, "ours": max}

    goes, calls, words = gemm.played_as(graphs, "cuda")
    plain = gemm.played_as(both, "cuda")

    assert {name: go() for name, go in goes.items()} == graphs
    assert (calls, words) == (gemm.GRAPH_CALLS, "replays of a CUDA graph of 8 calls")
    assert plain[:2] == (both, 1)
    assert plain[2].endswith("no graph of ours: RuntimeError: operation not permitted")
    assert gemm.played_as(both, "cpu") == (both, 1, "plain calls")


def test_plain_operations_never_count_as_our_kernel():
    sides = {"ours": {"tiled": {"tflops": 9.0, "off": 0.0}}, "theirs": {"torch": {"tflops": 9.0}}}

    assert gemm.share_of_cublas({"is_kernel": False, **sides}) == 0.0
    assert gemm.share_of_cublas({"is_kernel": True, **sides}) == 1.0


def test_without_time_products_are_told_to_be_missed(bench):
    found = gemm.run(-1.0, bench, sizes=(16,))

    assert found["rows"] == []
    assert "plain 16" in found["missed"]


def entry(**result):
    return {"status": "done", "took_s": 1.0, "result": result}


def product(name, rate, *, is_plain, off=2**-8):
    """Return a row beside torch at 100 and, where something follows, compiled torch at 110."""
    theirs = {"torch": {"tflops": 100.0}} | ({} if is_plain else {"compiled": {"tflops": 110.0}})
    ours = {"tiled": {"tflops": rate, "off": off}, "persistent": {"tflops": 1.0, "off": 2**-8}}
    kinds = {"is_plain": is_plain, "is_kernel": True, "why": ""}
    return {"case": name, "ours": ours, "theirs": theirs} | kinds


def products(*, plain=96.0, fused=111.0, off=2**-8, missed=()):
    rows = [product("plain 16", plain, is_plain=True, off=off)]
    return entry(rows=[*rows, product("relu2 16", fused, is_plain=False)], missed=list(missed))


def peer_rows(**last):
    names = [(rung.name, framework) for rung in ladder.RUNGS for framework in ladder.FRAMEWORKS]
    rows = [{"script": one, "framework": other, "per_s": 1.0} for one, other in names]
    return entry(rows=[*rows[:-1], last or rows[-1]])


def rung(*, goal=470_000, reached=480_000, is_proven=True):
    return entry(goal_per_s=goal, tuned_per_s=reached, is_proven=is_proven)


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({"gemm": products()}, True),
        ({"gemm": products(plain=90.0)}, False),
        ({"gemm": products(fused=105.0)}, False),
        ({"gemm": products(off=0.5)}, False),
        ({"gemm": products(off=float("nan"))}, False),
        ({"gemm": products(missed=["plain 8192"])}, False),
        ({"gemm": entry(rows=[], missed=[])}, False),
        ({"ladder gpt2": rung()}, True),
        ({"ladder gpt2": rung(reached=400_000)}, False),
        ({"ladder gpt2": rung(is_proven=False)}, False),
        ({"ladder cifar": rung(goal=None, reached=1)}, True),
        ({"ladder cifar": rung(goal=None, is_proven=False)}, False),
        ({"ladder cifar": {"status": "failed", "took_s": 1.0, "why": "x"}}, False),
        ({"peers": peer_rows()}, True),
        ({"peers": peer_rows(script="lora", framework="lightning", why="not installed")}, False),
        ({"peers": entry(rows=[{"script": "gpt2", "framework": "lightning", "per_s": 1}])}, False),
    ],
)
def test_the_compute_stages_hold_when_they_reach_their_goals(results, expected):
    assert holds(results) is expected


def test_a_wrong_variant_is_told_where_the_other_one_is_faster():
    row = product("plain 16", 0.5, is_plain=True, off=0.25)

    assert "persistent 1; torch 100 TFLOP/s; tiled is WRONG by 0.25" in gemm.words(row)


def test_what_follows_is_fused_into_the_variant_that_was_fastest_alone(monkeypatch, bench):
    rates = {"tiled": 3.0, "persistent": 5.0}
    asked = []

    def pretended(case, variants):
        asked.append(tuple(variants))
        ours = {name: {"tflops": rates[name], "off": 0.0} for name in variants}
        row = product(case.name, 1.0, is_plain=case.is_plain)
        return row | {"ours": ours}

    monkeypatch.setattr(gemm, "compared", pretended)

    found = gemm.run(60.0, bench, sizes=(16, 32))

    assert asked == [("tiled", "persistent")] * 2 + [("persistent",)] * 4
    assert found["missed"] == []


def test_a_case_that_fails_leaves_the_others(monkeypatch, bench):
    def fails_once(case, variants):
        if case.name == "plain 16":
            raise RuntimeError("illegal memory access")
        return product(case.name, 1.0, is_plain=case.is_plain)

    monkeypatch.setattr(gemm, "compared", fails_once)

    found = gemm.run(60.0, bench, sizes=(16, 32))

    assert len(found["rows"]) == len(gemm.cases((16, 32)))
    assert "illegal memory access" in gemm.words(found["rows"][0])
    assert not gemm.is_reached(found)


@pytest.mark.parametrize(
    ("gpu", "goal"), [("NVIDIA H100 80GB HBM3", 470_000), ("NVIDIA A100", None)]
)
def test_goals_are_those_of_the_gpus_they_are_for(gpu, goal, monkeypatch, bench):
    monkeypatch.setattr(ladder, "tune_noted", lambda *_: an_ablation(BF16))

    found = ladder.tuned(60.0, replace(bench, machine=a_machine("cuda", gpu)), RUNGS["gpt2"])

    assert found["goal_per_s"] == goal


def test_a_tuning_without_a_confirmed_recipe_is_not_proven():
    proven = ladder.reached(an_ablation(BF16), RUNGS["cifar"], per_sample=1)
    interrupted = ladder.reached(
        replace(an_ablation(BF16), confirmation=None, final=None), RUNGS["cifar"], per_sample=1
    )
    empty = ladder.reached(an_ablation(), RUNGS["cifar"], per_sample=1)

    assert ladder.is_reached(proven)
    assert not ladder.is_reached(interrupted)
    assert not ladder.is_reached(empty)
    assert "nothing proven" in ladder.rung_words(interrupted)


def test_predictions_of_a_rung_stand_in_the_record():
    ablation = an_ablation(BF16)
    row = replace(ablation.rows[0], predicted_ratio=1.8)
    found = ladder.reached(ablation, RUNGS["gpt2"], per_sample=1024)
    found |= {"ablation": replace(ablation, rows=(row,)).to_json(), "trials": []}

    record = record_of({"ladder gpt2": entry(**found)}, part="compute")

    assert record.recipe.names == ("bf16_autocast",)
    assert [line[:2] for line in calibration(record.ablations)][1:] == [("bf16_autocast", "1.80x")]


def test_stages_are_chosen_by_set_and_by_name():
    names = ("facts", "overhead", "ladder gpt2", "gemm", "ladder vit", "peers")
    stages = [Stage(name=name, work=lambda _: {}, most_s=1.0) for name in names]

    def found(*given):
        return [stage.name for stage in run_gpu.chosen(stages, *given)]

    assert found("all", ()) == list(names)
    assert found("base", ()) == ["facts", "overhead"]
    assert found("gemm,peers", ()) == ["gemm", "peers"]
    assert found("gemm,vit", ("gemm", "ladder gpt2")) == ["gemm"]


@pytest.mark.parametrize("part", run_gpu.SETS)
def test_the_stages_of_a_part_fit_into_one_call(bench, part):
    stages = run_gpu.chosen(run_gpu.stages_of(bench, run_gpu.Sizes()), part, ())

    assert 0 < sum(stage.most_s for stage in stages) <= run_gpu.TOTAL_S - run_gpu.START_S


@pytest.mark.parametrize("plan", run_gpu.PLANS)
def test_a_plan_is_a_target_and_begins_every_stage_in_its_time(bench, plan):
    stages = run_gpu.chosen(run_gpu.stages_of(bench, run_gpu.Sizes()), known(plan), ())
    total_s = run_gpu.PLAN_S[plan] - run_gpu.START_S

    assert f"--set {plan}\n" in (ROOT / "Makefile").read_text()
    if plan in run_gpu.AT_ONCE:
        assert max(stage.least_s for stage in stages) <= total_s
    else:
        *before, last = stages
        assert (
            sum(SEEN_S.get(stage.name, stage.most_s) for stage in before) + last.least_s <= total_s
        )


SEEN_S = {"facts": 11.0, "measure slow_compute": 25.0, "measure already_tuned": 15.0}
"""What stages took on an H200, or one like them; the others have all that they may take."""


def test_every_stage_is_in_a_part_and_has_words(bench):
    stages = run_gpu.stages_of(bench, run_gpu.Sizes())

    names = {stage.name for stage in stages}
    assert names == set().union(*STAGES.values())
    assert {name.partition(" ")[0] for name in names} <= set(WORDS)
    assert {name.partition(" ")[0] for name in names} - set(REACHED) == {
        "facts",
        "measure",
        "photographs",
    }


@pytest.mark.slow
@pytest.mark.parametrize("part", ["compute", "small", "gemm", "peers"])
def test_a_part_is_played_through_and_recorded(part, tmp_path, monkeypatch):
    """As on a GPU: each stage in its process, the record after each."""
    if part == "peers":
        for framework in (*ladder.FRAMEWORKS, "accelerate"):
            pytest.importorskip(framework)
    monkeypatch.setenv("OUT", str(tmp_path))

    run_gpu.main(["--smoke", "--set", part, "--total-s", "3600"])

    (folder,) = tmp_path.iterdir()
    raw = json.loads((folder / "result.json").read_text())["raw"]
    statuses = {name: entry["status"] for name, entry in raw.items()}
    assert statuses == dict.fromkeys(STAGES[part], "done")
    assert (folder / "README.md").read_text().startswith(f"# gpu_{part}")
    if part == "peers":
        assert ladder.all_ran(raw["peers"]["result"])
    if part == "gemm":
        assert raw["gemm"]["result"]["missed"] == []
