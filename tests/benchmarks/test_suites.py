"""The suites' own judgement: which claims hold, on made-up results."""

import itertools
import json
import math
import random
import statistics
import sys
from dataclasses import replace

import pytest

from benchmarks.bench import Arm, Bench, TrialFailedError, cells
from benchmarks.suites import (
    aa,
    already_tuned,
    ladder,
    overhead,
    overhead_fast,
    slow_compute,
    startup,
    starved_images,
    whole_training,
)
from flatout.records.ablation import StagedRow, TrainingLength
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.records.statistics import Decision
from flatout.records.trial import Outcome, Trial, Workload
from flatout.workflow.demo import make_job
from tests.benchmarks.made_up import BF16, a_machine, a_pair, a_profile, an_ablation


def test_a_comparison_reads_as_ratio_interval_and_n():
    assert cells(a_pair(2.0, 1.9, n=6)) == ("2.00x", "1.90-2.10", "6")


@pytest.mark.parametrize(
    ("ratio", "low", "of_hand", "holds"),
    [
        (2.3, 2.1, 0.97, True),
        (1.9, 1.85, 0.97, False),
        (2.3, 1.75, 0.97, False),
        (2.3, 2.1, 0.90, False),
    ],
)
def test_slow_compute_needs_ratio_interval_and_the_hand_tuned_reference(ratio, low, of_hand, holds):
    final, against_hand = a_pair(ratio, low), a_pair(of_hand)

    _claim, found = slow_compute.verdict(an_ablation(BF16), final, against_hand, has_bf16=True)

    assert found is holds


@pytest.mark.parametrize(("kept", "holds"), [((), True), ((BF16,), False)])
def test_without_bf16_hardware_the_claim_is_that_bf16_is_not_kept(kept, holds):
    pair = a_pair(1.0)

    claim, found = slow_compute.verdict(an_ablation(*kept), pair, pair, has_bf16=False)

    assert found is holds
    assert "bf16 is not kept" in claim


@pytest.mark.parametrize(
    ("features", "kind", "expected"),
    [(("amx_bf16",), "cpu", True), ((), "cpu", False), ((), "cuda", True)],
)
def test_bf16_pays_where_the_hardware_has_it(tmp_path, features, kind, expected):
    bench = Bench(machine=a_machine(kind=kind, features=features), work=tmp_path)

    assert slow_compute.has_fast_bf16(bench) is expected


@pytest.mark.parametrize(("ratio", "holds"), [(1.79, False), (1.81, True)])
def test_starved_images_needs_its_confirmed_ratio(ratio, holds):
    ablation = an_ablation(Choice(technique="loader_workers"), ratio=ratio)

    assert starved_images.holds(ablation) is holds
    assert len(starved_images.rows(ablation)) == 4


def test_starved_images_that_keep_nothing_do_not_hold():
    assert not starved_images.holds(an_ablation())
    assert starved_images.confirmed(an_ablation())[0] == "nothing kept"


def test_starved_images_may_not_compile():
    chosen = starved_images.levers()

    assert {"loader_workers", "bf16_autocast", "channels_last", "cpu_threads"} <= set(chosen)
    assert {"torch_compile", "regional_compile", "fused_optimizer"} & set(chosen) == set()


@pytest.mark.parametrize(
    ("ablation", "holds"),
    [
        (an_ablation(), True),
        (an_ablation(BF16), False),
        (an_ablation(stopped="budget"), False),
    ],
)
def test_already_tuned_holds_when_the_tuning_ended_and_kept_nothing(ablation, holds):
    assert already_tuned.holds(ablation) is holds
    assert len(already_tuned.rows(ablation)) == 2 + len(ablation.rows)


def test_equal_sides_are_practically_never_kept(tmp_path):
    bench = Bench(machine=a_machine(), work=tmp_path)

    decisions = [aa.simulate(bench, seed) for seed in range(aa.SIMULATED)]

    assert decisions.count(Decision.KEPT) <= aa.MOST_DIFFERENT
    assert aa.simulate(bench, 5) is decisions[5]


@pytest.mark.parametrize(("deviation", "correlation"), aa.NOISES)
def test_simulated_trials_have_the_noise_they_are_said_to_have(deviation, correlation):
    trace = aa.trace(random.Random(1), deviation, correlation)
    times = list(itertools.islice(trace, 20_000))

    ratios = [later / earlier for earlier, later in itertools.pairwise(times)]
    expected = deviation * (2 * (1 - correlation)) ** 0.5
    assert statistics.stdev(ratios) == pytest.approx(expected, rel=0.3)
    assert statistics.median(times) == pytest.approx(0.1, rel=0.02)


def switched(*added):
    """Return what one process would leave: pairs of blocks with so much added."""
    blocks = []
    for number, share in enumerate(added):
        pair = [[True, [0.010 * (1 + share)] * 5], [False, [0.010] * 5]]
        blocks += pair if number % 2 else pair[::-1]
    return {"blocks": blocks}


def test_overhead_of_a_process_is_the_median_over_its_pairs():
    assert overhead.added_log(switched(0.004, 0.006, 5.0)) == pytest.approx(math.log(1.006))


@pytest.mark.parametrize(
    ("added", "holds"), [((0.001, 0.002, 0.003), True), ((0.0, 0.009, 0.018), False)]
)
def test_overhead_holds_only_where_the_whole_interval_is_allowed(added, holds):
    found = overhead.judge(overhead.SLOW, [switched(share) for share in added])

    assert found.added < 0.01
    assert found.holds is holds


def test_overhead_reads_as_a_share_with_its_interval():
    found = overhead.judge(overhead.SLOW, [switched(share) for share in (0.001, 0.002, 0.003)])

    assert overhead.words(found) == "slow compute +0.20% (-0.05% to +0.45%)"


@pytest.mark.slow
def test_overhead_is_measured_in_real_processes_that_switch(tmp_path):
    arguments = ("--width", "32", "--steps", "200")
    job = replace(overhead_fast.JOBS[1], arguments=arguments, block=5, processes=2)
    bench = Bench(machine=a_machine(), work=tmp_path, say=lambda line: None)

    record = overhead.record_of(bench, "overhead_fast", (job,))

    seen = record.raw["2 ms step"]
    assert [one["changes"]["off"] for one in seen] == [0, 0]
    assert all(len(one["blocks"]) > 10 for one in seen)
    assert record.table[1][0] == "2 ms step"


def test_startup_measures_both_sides_and_finds_no_torch(tmp_path):
    record = startup.run(Bench(machine=a_machine(), work=tmp_path))

    assert len(record.raw["help_s"]) == len(record.raw["bare_s"]) == startup.RUNS
    assert record.raw["imports_torch"] is False


class HandLab:
    """Times recipes by a known truth; a technique without a factor cannot act."""

    def __init__(self, factors):
        self.factors = factors

    def time(self, recipe, *, must_apply):
        assert must_apply
        if any(name not in self.factors for name in recipe.names):
            return Trial(recipe=recipe, outcome=Outcome.REFUSED)
        step_ms = 100.0 * math.prod(self.factors[name] for name in recipe.names)
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=a_profile(step_ms))


def a_bench(tmp_path):
    return Bench(machine=a_machine(), work=tmp_path, say=lambda _: None)


def test_by_hand_keeps_what_was_faster_and_everything_is_all_that_could_act(tmp_path):
    lab = HandLab({"bf16_autocast": 0.5, "torch_compile": 1.2, "fused_optimizer": 0.9})

    greedy, everything, tried = ladder.climb_by_hand(lab, a_bench(tmp_path))

    assert greedy.names == ("bf16_autocast", "fused_optimizer")
    assert everything.names == ("bf16_autocast", "torch_compile", "fused_optimizer")
    assert dict(tried)["sdpa_attention"] is None
    assert dict(tried)["fused_optimizer"] == pytest.approx(45.0)


def an_arm(name, times_ms, *choices):
    arm = Arm(name=name, lab=None, recipe=Recipe(choices=choices))
    arm.profiles.extend(a_profile(ms) for ms in times_ms)
    return arm


@pytest.mark.parametrize(("tuned_ms", "expected"), [(51.0, True), (60.0, False)])
def test_tune_has_to_come_within_five_percent_of_the_best_by_hand(tuned_ms, expected):
    result = ladder.Result(
        name="GPT",
        ablation=an_ablation(BF16),
        baseline=an_arm("baseline", [100.0, 101.0]),
        tuned=an_arm("tuned", [tuned_ms, 1.01 * tuned_ms], BF16),
        by_hand=(an_arm("steps", [50.0, 50.5]), an_arm("everything", [70.0, 71.0])),
        tried_by_hand=(("baseline", 100.0),),
    )

    assert ladder.holds([result]) is expected
    assert result.best_by_hand.name == "steps"
    assert len(ladder.rows([result])) == 6


def test_the_same_techniques_in_another_order_are_one_arm(tmp_path):
    fused = Choice(technique="fused_optimizer")
    recipes = {"a": Recipe(choices=(BF16, fused)), "b": Recipe(choices=(fused, BF16))}

    arms = ladder.arms_of(recipes, a_bench(tmp_path), None, tmp_path)

    assert arms["a"] is arms["b"]


def a_staged_ablation():
    """Return a tuning that foretells 200 s for the training as it is and 100 s with the recipe."""
    stages = (StagedRow(samples_per_s=5.0), StagedRow(technique="bf16", samples_per_s=10.0))
    ablation = an_ablation(BF16)
    baseline = replace(ablation.baseline, samples_per_step=10)
    length = TrainingLength(steps=100.0, source="--epochs 100")
    return replace(ablation, baseline=baseline, stages=stages, training=length)


def trainings(took=(190.0, 105.0), better=0.0, seeds=range(5)):
    """Return trainings of which those with the recipe learn a little otherwise, or better."""
    return [
        {
            "arm": arm,
            "seed": seed,
            "took_s": took[number] + seed - 2,
            "accuracy": 0.5 + number * (better + 0.01 * (-1) ** seed),
            "validation_loss": 1.0 + number * 0.02 * (-1) ** seed,
        }
        for seed in seeds
        for number, arm in enumerate(whole_training.ARMS)
    ]


@pytest.mark.parametrize(
    ("found", "is_held"),
    [
        (trainings(), True),
        (trainings(took=(190.0, 80.0)), False),
        (trainings(took=(230.0, 105.0)), False),
        (trainings(better=-0.1), False),
        (trainings(better=0.1), True),
        (trainings(seeds=range(4)), False),
        (trainings()[:1], False),
        ([], False),
    ],
)
def test_foretold_minutes_hold_for_both_trainings_and_five_seeds_learn_no_worse(found, is_held):
    record = whole_training.record_of(a_staged_ablation(), found, [])

    assert record.holds is is_held


def test_trainings_are_shown_by_seed_with_the_middle_of_each_side_and_what_differs():
    table = whole_training.rows(a_staged_ablation(), trainings())

    assert table[1] == ("seed 0, unchanged", "3 min 8 s", "0.500", "1.000")
    assert [row[0] for row in table[-3:]] == [
        "unchanged, middle of 5",
        "with the recipe, middle of 5",
        "with the recipe less unchanged, 95 % interval",
    ]
    assert table[-3][1:3] == ("3 min 10 s; foretold 3 min 20 s, +5.3%", "0.500")
    assert table[-1][2] == "+0.002 (-0.012 to +0.016)"
    assert {len(row) for row in table} == {4}
    assert len(whole_training.rows(a_staged_ablation(), [])) == 1


def test_a_whole_training_goes_on_where_it_was_and_its_parts_end_with_the_record(tmp_path):
    parts = tmp_path / "parts"
    parts.mkdir()
    (parts / "ablation.json").write_text(json.dumps(a_staged_ablation().to_json()))
    for row in trainings():
        whole_training.part_of(parts, row["seed"], row["arm"]).write_text(json.dumps(row))
    last = whole_training.part_of(parts, 4, whole_training.TUNED)
    held_back = last.read_text()
    last.unlink()
    bench = replace(a_bench(tmp_path), parts=parts, only=("0", "3"))

    some = whole_training.run(bench)
    last.write_text(held_back)
    record = whole_training.run(replace(bench, only=()))

    assert not some.holds
    assert record.holds
    assert record.raw["trainings"] == trainings()
    assert not parts.exists()


def test_a_seed_that_there_is_not_is_named():
    with pytest.raises(UserError, match="no seed 7; there are 0, 1, 2, 3, 4"):
        whole_training.seeds_of(("1", "7"))


def test_both_sides_train_the_same_seed(tmp_path):
    job = Workload(target="train.py", arguments=("--epochs", "3"), folder=tmp_path, python="python")

    plain, tuned = (whole_training.command_of(job, arm, 3, tmp_path) for arm in whole_training.ARMS)

    assert plain == [sys.executable, "train.py", "--epochs", "3", "--seed", "3"]
    assert tuned[1:5] == ["-m", "flatout", "run", "--with"]
    assert tuned[6:] == plain[1:]


def test_a_training_gives_its_time_and_its_last_metrics(tmp_path):
    job = Workload(target="x.py", folder=tmp_path, python=sys.executable)
    said = "epoch {} validation loss {} accuracy {}"
    script = f"print('{said.format(0, 2.5, 0.1)}'); print('{said.format(1, 1.25, 0.75)}')"

    found = whole_training.train([sys.executable, "-c", script], job, tmp_path / "log")

    assert found.pop("took_s") > 0
    assert found == {"validation_loss": 1.25, "accuracy": 0.75}
    for script, words in (("exit(3)", "ended with 3"), ("print(1)", "printed no accuracy")):
        with pytest.raises(TrialFailedError, match=words):
            whole_training.train([sys.executable, "-c", script], job, tmp_path / "log")


@pytest.mark.slow
def test_the_demo_s_script_prints_the_metrics_that_are_looked_for(tmp_path):
    job = make_job(tmp_path, images=24)
    job = replace(job, arguments=(*job.arguments[:2], "--epochs", "1", "--batch-size", "4"))

    command = whole_training.command_of(job, whole_training.PLAIN, 1, tmp_path)
    found = whole_training.train(command, job, tmp_path / "log")

    assert 0 <= found["accuracy"] <= 1
    assert found["validation_loss"] > 0
