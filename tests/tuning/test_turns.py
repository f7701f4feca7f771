"""Pairs of fresh processes that take turns: real ones, and what is made of them."""

import itertools
import json
import math
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from flatout.records.profile import PeakBytes
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Trial
from flatout.tuning import experiments, pairs
from flatout.tuning.experiments import Record, TrialHistory
from flatout.tuning.trials import TrialOptions
from flatout.tuning.turns import (
    BETWEEN_PROCESSES,
    PRIOR_FREEDOM,
    can_take_turns,
    compare_turns,
    noise_of,
    play_in_turns,
)
from tests.paths import ROOT
from tests.support.programs import workload_of
from tests.techniques.facts import GIB, loader, machine, profile

SCRIPTS = ROOT / "tests/scripts/turns"
FUSED = Recipe().plus(Choice(technique="fused_optimizer"))


@pytest.fixture
def folder():
    """Yield a folder that is not journaled, as those for temporary files are not."""
    found = Path(tempfile.mkdtemp(prefix="flatout-test-", dir="/dev/shm"))
    yield found
    shutil.rmtree(found)


def turned(script, log, *arguments, candidate=Recipe(), starts_with_base=True, tmp_path):
    shutil.copy(SCRIPTS / f"{script}.py", tmp_path)
    workload = workload_of(tmp_path, f"{script}.py", str(log), *arguments)
    options = TrialOptions(limit_s=120.0)
    return play_in_turns(workload, (Recipe(), candidate), machine(), options, starts_with_base)


def steps_in(log):
    """Return the steps that the processes noted, in the order of their beginnings."""
    rows = [json.loads(line) for path in log.iterdir() for line in path.read_text().splitlines()]
    return sorted(rows, key=lambda row: row["began"])


@pytest.mark.slow
@pytest.mark.parametrize("starts_with_base", [True, False])
def test_only_one_side_trains_at_a_time(folder, tmp_path, starts_with_base):
    base, candidate = turned(
        "noted", folder, candidate=FUSED, starts_with_base=starts_with_base, tmp_path=tmp_path
    )

    assert base.outcome is candidate.outcome is Outcome.OK
    assert candidate.applied[0].status == "applied"
    assert min(len(x.details["probes"]["turns"]["turns_s"]) for x in (base, candidate)) >= 9
    steps = steps_in(folder)
    both = {row["process"] for row in steps}
    assert len(both) == 2
    last = min(max(r["ended"] for r in steps if r["process"] == one) for one in both)
    together = [row for row in steps if row["ended"] < last]
    for before, after in itertools.pairwise(together):
        assert before["ended"] <= after["began"]


@pytest.mark.slow
def test_a_side_that_crashes_gives_no_pair_and_leaves_nothing(folder, tmp_path):
    assert turned("noted", folder, "crash", candidate=FUSED, tmp_path=tmp_path) == ()


@pytest.mark.slow
def test_a_technique_that_does_not_apply_is_told(folder, tmp_path):
    candidate = Recipe().plus(Choice(technique="channels_last"))

    _, trial = turned("noted", folder, candidate=candidate, tmp_path=tmp_path)

    assert trial.not_applied[0].technique == "channels_last"


@pytest.mark.slow
def test_workers_make_nothing_while_their_side_waits(folder, tmp_path):
    workers = Recipe().plus(Choice(technique="loader_workers", settings={"num_workers": 1}))

    pair = turned("loaded", folder, candidate=workers, tmp_path=tmp_path)

    assert len(pair) == 2
    made, begun = steps_in(folder), {}
    for row in made:
        begun.setdefault((row["process"], row["kind"]), []).append(row["began"])
    (base,) = {
        process for process, kind in begun if kind == "sample" and (process, "step") in begun
    }
    (worker,) = {process for process, kind in begun if kind == "sample"} - {base}
    (candidate,) = {process for process, kind in begun if kind == "step"} - {base}
    # While the base takes its steps, the other side's worker makes no sample.
    both = min(begun[base, "step"][-1], begun[candidate, "step"][-1])
    first = max(begun[base, "step"][3], begun[candidate, "step"][3])
    turns = [row for row in made if first < row["began"] < both]
    inside = [
        middle
        for before, middle, after in zip(turns, turns[1:], turns[2:], strict=False)
        if middle["process"] == worker and before["process"] == after["process"] == base
    ]
    assert len(begun[worker, "sample"]) > 100
    assert not inside


@pytest.mark.slow
def test_an_interrupt_ends_both_sides(folder, tmp_path, monkeypatch):
    from flatout.tuning import turns

    ended = []
    real = turns.run_trial

    def run_trial(workload, recipe, machine, asked, shared):
        if not recipe.choices:
            raise KeyboardInterrupt
        ended.append(real(workload, recipe, machine, asked, shared))

    monkeypatch.setattr(turns, "run_trial", run_trial)
    with pytest.raises(KeyboardInterrupt):
        turned("noted", folder, candidate=FUSED, starts_with_base=False, tmp_path=tmp_path)

    assert len(ended) == 1
    assert ended[0].wall_s < 60


def trial(recipe=Recipe(), turns_s=(), step_ms=100.0, **changes):
    seen = {"probes": {"turns": {"turns_s": list(turns_s), "busy_share": 0.0, "threads": []}}}
    phases = {"forward": 0.4 * step_ms, "backward": 0.6 * step_ms}
    known = {"profile": profile(phases_ms=phases), "outcome": Outcome.OK, "wall_s": 5.0}
    return Trial(recipe=recipe, **known | {"details": seen} | changes)


SMALL = PeakBytes(device=GIB)


@pytest.mark.parametrize(
    ("changes", "details", "expected"),
    [
        ({}, {}, True),
        ({"kind": "cuda"}, {}, False),
        ({"loaders": (loader(num_workers=2),)}, {}, True),
        ({"peak_bytes": PeakBytes(device=8 * GIB)}, {}, False),
        ({}, {"undone": 3}, False),
        ({}, {"undone": 3, "details": {"is_overlaid": True}}, True),
    ],
)
def test_turns_need_memory_twice_and_no_files(changes, details, expected):
    seen = trial(profile=profile(**{"peak_bytes": SMALL} | changes), **details)

    assert can_take_turns(seen, machine()) is expected


def made_up(noise, seed=0, shift=0.0):
    deal = random.Random(seed)
    sides = [[0.1 * math.exp(deal.gauss(0, noise)) for _ in range(10)] for _ in range(2)]
    return [trial(turns_s=sides[0]), trial(turns_s=[s / math.exp(shift) for s in sides[1]])]


def test_the_ratio_of_a_pair_is_the_middle_one_of_its_turns():
    found = compare_turns([trial(turns_s=[0.2] * 10), trial(turns_s=[9.0, 9.0, *[0.1] * 8])])

    assert found.log_ratio == pytest.approx(math.log(2))
    assert found.variance == pytest.approx(BETWEEN_PROCESSES**2)


def test_turns_that_differ_make_a_pair_unsure():
    noisy, quiet = compare_turns(made_up(0.2)), compare_turns(made_up(0.01))

    assert noisy.variance > 4 * quiet.variance


def test_how_sure_many_turns_are_counts_next_to_what_processes_differ_by():
    bursts, even = (noise_of([compare_turns(made_up(noise))], []) for noise in (0.3, 0.001))

    assert even.freedom == PRIOR_FREEDOM
    assert even.variance == pytest.approx(BETWEEN_PROCESSES**2, rel=0.01)
    assert PRIOR_FREEDOM < bursts.freedom <= 10


def test_a_drift_that_both_sides_share_is_no_noise():
    drift = [0.1 * math.exp(0.3 * math.sin(number)) for number in range(10)]

    found = compare_turns([trial(turns_s=drift), trial(turns_s=[s / 1.1 for s in drift])])

    assert found.log_ratio == pytest.approx(math.log(1.1))
    assert found.variance == pytest.approx(BETWEEN_PROCESSES**2)


def test_pairs_of_other_recipes_that_differ_by_more_than_their_turns_say_count():
    turned = [compare_turns(made_up(0.01))]

    assert noise_of(turned, []).freedom >= PRIOR_FREEDOM
    assert noise_of(turned, [[0.1, -0.1, 0.2], [0.0, 0.3, 0.1]]).variance > 0.02
    assert noise_of(turned, [[0.001, 0.0, 0.0], [0.0, 0.001, 0.0]]) == noise_of(turned, [])
    assert noise_of(turned, [[0.1], [0.4]]) == noise_of(turned, [])


@pytest.mark.slow
@pytest.mark.parametrize("between", [0.01, 0.03, 0.07])
def test_a_recipe_without_a_gain_is_seldom_kept(between):
    deal, called, rounds = random.Random(1), 0, 400

    for _ in range(rounds):
        # One process in four lies badly: what was seen next to busy neighbours.
        history = TrialHistory(machine=machine(), takes_turns=True)

        def pair():
            far = between * (2.0 if deal.random() < 0.25 else 0.5)
            return tuple(made_up(0.03, deal.random(), deal.gauss(0, far)))

        match, _ = played(lambda _: Record(key="", elapsed_s=0.0, pair=pair()), history=history)
        called += match.decision is pairs.Decision.KEPT

    assert called <= 0.01 * rounds


def played(answers, *, takes_turns=True, history=None):
    """Return the match of a comparison whose experiments are answered, and their kinds."""
    history = history or TrialHistory(machine=machine(), takes_turns=takes_turns)
    asking = pairs.play(history, Recipe(), FUSED, may_go_on=lambda _: True)
    kinds = []
    try:
        asked = next(asking)
        while True:
            kinds.append(asked.kind)
            record = answers(asked)
            asked = asking.send(replace(record, key=asked.key))
    except StopIteration as end:
        return end.value, kinds


def pair_of(ratio, noise=0.01, seed=0):
    base, candidate = made_up(noise, seed, math.log(ratio))
    return base, replace(candidate, recipe=FUSED)


def test_two_pairs_in_turns_prove_a_gain_that_is_well_above_their_noise():
    match, kinds = played(lambda _: Record(key="", elapsed_s=0.0, pair=pair_of(1.2)))

    assert match.decision is pairs.Decision.KEPT
    assert kinds == ["turns", "turns"]
    assert match.comparison.ratio == pytest.approx(1.2, rel=0.02)


@pytest.mark.parametrize(("taken_by", "counts"), [("steal_share", True), ("foreign_share", False)])
def test_other_virtual_machines_slow_both_sides_alike_other_processes_do_not(taken_by, counts):
    load = {"load": {taken_by: 0.2, "wall_s": 5.0}}
    pair = tuple(replace(x, details={**x.details, **load}) for x in pair_of(1.2))

    match, kinds = played(lambda _: Record(key="", elapsed_s=0.0, pair=pair))

    assert (match.decision is pairs.Decision.KEPT) is counts
    assert bool(match.disturbed) is not counts
    assert kinds == ["turns", "turns"]


def test_a_slow_start_of_the_other_side_makes_no_trial_longer():
    history = TrialHistory(machine=machine(), takes_turns=True)
    history.wall_s[f"time {experiments.key_of(Recipe())}"] = 4.0
    pair = tuple(replace(each, wall_s=40.0) for each in pair_of(1.2))

    played(lambda _: Record(key="", elapsed_s=0.0, pair=pair), history=history)

    assert history.cost_s(Recipe(), default=1.0) == 4.0
    assert history.cost_s(FUSED, default=1.0) == 20.0


def test_turns_that_differ_much_prove_nothing():
    match, kinds = played(lambda asked: Record(key="", elapsed_s=0.0, pair=pair_of(1.1, noise=0.4)))

    assert match.decision is pairs.Decision.UNDECIDED
    assert len(kinds) > 3


def test_where_turns_do_not_work_the_pair_is_played_one_after_the_other():
    def answers(asked):
        step_ms = 50.0 if asked.recipe == FUSED else 100.0
        one = trial(asked.recipe, step_ms=step_ms)
        return Record(key="", elapsed_s=0.0, trial=None if asked.kind == "turns" else one)

    match, kinds = played(answers)

    assert kinds[0] == "turns"
    assert {*kinds[1:]} == {"time"}
    assert match.decision is pairs.Decision.KEPT


def test_turns_that_never_work_are_no_longer_tried():
    history = TrialHistory(machine=machine(), takes_turns=True)

    def answers(asked):
        one = trial(asked.recipe, step_ms=50.0 if asked.recipe == FUSED else 100.0)
        return Record(key="", elapsed_s=0.0, trial=None if asked.kind == "turns" else one)

    kinds = [played(answers, history=history)[1] for _ in range(3)]

    assert [each.count("turns") for each in kinds] == [1, 1, 0]


def test_without_turns_none_are_asked_for():
    _, kinds = played(
        lambda asked: Record(key="", elapsed_s=0.0, trial=trial(asked.recipe)), takes_turns=False
    )

    assert {*kinds} == {"time"}


def test_a_technique_that_failed_in_turns_is_the_failure():
    from flatout.records.trial import Applied

    refused = Applied(technique="fused_optimizer", status="not_applicable", why="no")
    pair = (trial(turns_s=[0.1] * 10), trial(FUSED, profile=None, applied=(refused,)))

    match, kinds = played(lambda _: Record(key="", elapsed_s=0.0, pair=pair))

    assert match.failure == pair[1]
    assert kinds == ["turns"]


def test_a_pair_in_turns_is_kept_in_the_journal():
    record = Record(key="turns", elapsed_s=1.0, pair=pair_of(1.1))

    again = experiments.record_from_json(json.loads(json.dumps(record.to_json())))

    assert compare_turns(again.pair) == compare_turns(record.pair)
