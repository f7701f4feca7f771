"""What a lab asks of its trials."""

import sys

from flatout.analysis.profile import summarise
from flatout.records.ablation import LossCheck
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.experiments import Judgement, Record, key_of, record_from_json
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from flatout.tuning.trials import run_trial
from tests.analysis.test_profile import launch_bound
from tests.support.results import result
from tests.techniques.facts import gpu, machine


def lab_of(folder, runner=run_trial, **facts):
    """Return what runs the script of a folder, on a machine with these facts."""
    return TrialRunner(
        workload=Workload(target="train.py", folder=folder, python=sys.executable),
        machine=machine(**facts),
        out=folder,
        limit_s=60.0,
        runner=runner,
    )


def test_the_copies_are_looked_at_where_steps_are_timed_and_nowhere_else(tmp_path):
    traced = []

    def runner(_workload, recipe, _machine, options):
        traced.append(options.traces_kernels)
        return Trial(recipe=recipe, outcome=Outcome.CRASH)

    lab = lab_of(tmp_path, runner)

    lab.time(Recipe())
    lab.guard(Recipe(), "baseline", {}, 2)
    lab.drive(lab.history.look("samples", Recipe(), {"pipeline": {}}, 12))

    assert traced == [True, False, False]


def test_what_the_device_runs_is_looked_at_once_a_recipe(tmp_path):
    other = Recipe(choices=(Choice(technique="tf32"),))
    traced = []

    def runner(_workload, recipe, _machine, options):
        traced.append(options.traces_kernels)
        device = {"kind": "cuda", "name": "a GPU"}
        plain = summarise(result(device=device), machine(device=gpu()))
        profile = launch_bound() if options.traces_kernels else plain
        return Trial(recipe=recipe, outcome=Outcome.OK, profile=profile, details={"load": {}})

    lab = lab_of(tmp_path, runner)

    trials = [lab.time(recipe) for recipe in (Recipe(), other, Recipe(), other)]

    assert traced == [True, True, False, False]
    first, _, third, _ = [trial.profile for trial in trials]
    assert third.trace == first.trace
    assert third.device_busy_share == first.device_busy_share
    assert third.regime == first.regime


def test_a_resumed_tuning_does_not_look_again(tmp_path):
    traced = []

    def runner(_workload, recipe, _machine, options):
        traced.append(options.traces_kernels)
        return Trial(
            recipe=recipe, outcome=Outcome.OK, profile=launch_bound(), details={"load": {}}
        )

    lab = lab_of(tmp_path, runner)
    recorded = Trial(
        recipe=Recipe(), outcome=Outcome.OK, profile=launch_bound(), details={"load": {}}
    )
    key = f"time {key_of(Recipe())}"
    lab.recorded = {key: [Record(key=key, elapsed_s=1.0, trial=recorded)]}

    lab.time(Recipe())
    lab.time(Recipe())

    assert traced == [False]


def test_time_for_the_guard_is_planned_from_what_its_trials_took(tmp_path):
    walls = iter([9.0, 4.0, 3.0])

    def runner(_workload, recipe, *_):
        return Trial(recipe=recipe, outcome=Outcome.OK, wall_s=next(walls))

    lab = lab_of(tmp_path, runner)
    referee = GuardChecker(lab, lambda _: None)
    lab.judge = referee.judge
    before = lab.history.guard_cost_s(default=2.0)

    lab.drive(lab.history.check(Recipe()))

    # The baseline's trial left no record, so that there was no other.
    assert (before, lab.history.guard_cost_s(default=2.0)) == (2.0, 9.0)


def test_what_the_guard_took_is_known_to_a_tuning_that_goes_on(tmp_path):
    judgement = Judgement(check=LossCheck(status="same"), trial_s=7.0)
    written = Record(key=f"check {key_of(Recipe())}", elapsed_s=1.0, judgement=judgement)
    lab = lab_of(tmp_path, None)
    lab.recorded = {written.key: [record_from_json(written.to_json())]}

    lab.drive(lab.history.check(Recipe()))

    assert lab.history.guard_cost_s(default=2.0) == 7.0


def test_a_guard_trial_without_a_record_is_not_judged_by_an_earlier_one_s(tmp_path):
    found = []

    def runner(_workload, recipe, _machine, options):
        found.append(sorted(path.name for path in options.keep.iterdir()))
        return Trial(recipe=recipe, outcome=Outcome.CRASH)

    place = tmp_path / "guard" / "candidate-0"
    place.mkdir(parents=True)
    for name in ("guard.json", "guard-rank1.json", "notes.txt"):
        (place / name).write_text("{}")
    lab = lab_of(tmp_path, runner)

    lab.guard(Recipe(), "candidate-0", {}, 2)

    assert found == [["notes.txt"]]


def test_what_a_killed_trial_was_compiling_is_not_read_by_the_next(tmp_path):
    outcomes = iter([Outcome.CRASH, Outcome.HANG])
    lab = lab_of(
        tmp_path, lambda _workload, recipe, *_: Trial(recipe=recipe, outcome=next(outcomes))
    )
    lab.cache = tmp_path / "compiled"
    half = lab.cache / "pz" / "main.so"
    half.parent.mkdir(parents=True)
    half.write_bytes(b"ELF")

    lab.time(Recipe())
    assert half.exists()
    lab.time(Recipe())
    assert list(lab.cache.iterdir()) == []
