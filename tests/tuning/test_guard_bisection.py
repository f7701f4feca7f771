"""What becomes of a recipe that the guard rejects: the guilty technique, or a weaker promise."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from flatout.records.ablation import LossCheck, Verdict
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial, Workload
from flatout.tuning.guard_checker import GuardChecker, find_guilty
from flatout.tuning.trial_runner import TrialRunner
from tests.techniques.facts import machine
from tests.workflow.test_tune import World, run, verdicts

FIVE = ("channels_last", "fast_resize", "ram_cache", "fused_optimizer", "bf16_autocast")


class Strict(GuardChecker):
    """Rejects every recipe that holds one of some techniques."""

    def __init__(self, *guilty):
        super().__init__(lab=None, tell=lambda _: None)
        self.guilty, self.asked = guilty, []

    def _judge(self, recipe):
        self.asked.append(recipe.names)
        found = [name for name in recipe.names if name in self.guilty]
        return LossCheck(status="rejected" if found else "within", why=f"{found} differ")


def guilty_of(checker, folder, base, recipe, may_go_on=lambda: True):
    """Return what bisection finds, with this checker as the guard."""
    workload = Workload(target="train.py", folder=folder)
    runner = TrialRunner(
        workload=workload, machine=machine(), out=folder, limit_s=1.0, judge=checker.judge
    )
    return runner.drive(find_guilty(runner.history, base, recipe, may_go_on))


def recipe_of(*names):
    return Recipe(choices=tuple(Choice(technique=name) for name in names))


@pytest.mark.parametrize("guilty", [FIVE[:1], FIVE[2:3], FIVE[4:], (FIVE[1], FIVE[3]), FIVE])
def test_bisection_names_what_the_guard_rejects(guilty, tmp_path):
    checker = Strict(*guilty)

    found = guilty_of(checker, tmp_path, Recipe(), recipe_of(*FIVE))

    assert {choice.technique for choice in found} == set(guilty)


def test_one_guilty_technique_among_many_costs_few_trials(tmp_path):
    checker = Strict("ram_cache")

    guilty_of(checker, tmp_path, recipe_of("tf32"), recipe_of("tf32", *FIVE))

    assert len(checker.asked) <= 5


def test_without_time_nothing_is_called_guilty(tmp_path):
    checker = Strict("ram_cache")

    assert guilty_of(checker, tmp_path, Recipe(), recipe_of(*FIVE), lambda: False) == ()


def test_a_bundle_goes_on_without_the_technique_that_the_guard_rejects(tmp_path, monkeypatch):
    def check(_self, recipe):
        is_guilty = "channels_last" in recipe.names
        return LossCheck(status="rejected" if is_guilty else "within", why="gradient of bias")

    class Quick(World):
        now = 0.0

        def __call__(self, *asked):
            trial = replace(super().__call__(*asked), wall_s=6.0)
            self.now += trial.wall_s
            if trial.profile is None:
                return trial
            models = tuple(replace(x, conv_weights=3) for x in trial.profile.models)
            return replace(trial, profile=replace(trial.profile, models=models))

    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", check)
    names = ("channels_last", "bf16_autocast", "fused_optimizer")
    world = Quick(dict.fromkeys(names, 0.8), noise=0.002)

    ablation = run(world, tmp_path, only=names, budget_s=170.0, clock=lambda: world.now)

    assert set(ablation.recipe.names) == {"bf16_autocast", "fused_optimizer"}
    (row,) = [row for row in ablation.rows if row.verdict is Verdict.REJECTED]
    assert row.why.endswith("what the guard rejects of them: channels_last")
    assert not any(label == "channels_last" for label in world.asked)


class Graded(GuardChecker):
    """Judges every recipe to be inside the limits of some promises."""

    def __init__(self, ceiling, passes):
        super().__init__(lab=None, tell=lambda _: None, ceiling=ceiling)
        self.passes = passes
        self._baseline = (SimpleNamespace(low_precision=True),)

    def _judged(self, promise, *_args, **_known):
        is_inside = promise in self.passes
        return LossCheck(status="within" if is_inside else "rejected", why=f"by {promise.value}")


ALLOCATOR = recipe_of("cpu_allocator")
LOOSE = (Numerics.ROUNDING, Numerics.PRECISION)


def test_what_misses_its_promise_is_kept_under_a_weaker_one_that_is_allowed():
    check = Graded(Numerics.PRECISION, LOOSE)._compare(ALLOCATOR, ())

    assert (check.passed, check.promise) == (True, "rounding")
    assert check.why == "it misses exact (by exact) and keeps rounding: by rounding"


@pytest.mark.parametrize(
    ("ceiling", "passes"), [(Numerics.EXACT, LOOSE), (Numerics.ROUNDING, LOOSE[1:])]
)
def test_a_weaker_promise_than_the_user_allows_is_no_way_out(ceiling, passes):
    check = Graded(ceiling, passes)._compare(ALLOCATOR, ())

    assert (check.status, check.why) == ("rejected", "by exact")


def test_a_technique_is_held_to_its_weaker_promise_in_every_later_recipe():
    checker = Graded(Numerics.PRECISION, LOOSE)
    checker._weaker = {"cpu_allocator": Numerics.ROUNDING}

    check = checker._compare(recipe_of("cpu_allocator", "ram_cache"), ())

    assert (check.passed, check.promise) == (True, "")


def test_the_row_says_under_which_promise_a_technique_was_kept(tmp_path, monkeypatch):
    weaker = LossCheck(status="within", promise="precision", why="it misses rounding")
    monkeypatch.setattr("flatout.workflow.tune.GuardChecker.check", lambda *_: weaker)

    ablation = run(World({"fused_optimizer": 0.5}), tmp_path, only=("fused_optimizer",))

    assert verdicts(ablation) == {"fused_optimizer": Verdict.KEPT}
    assert (ablation.rows[0].numerics, ablation.rows[0].why) == ("precision", "it misses rounding")


@pytest.mark.parametrize(
    ("ranks", "draws"), [([False, False], False), ([False, True], True), ([], True)]
)
def test_the_compiler_is_set_for_random_numbers_only_where_some_are_drawn(ranks, draws):
    asked = []

    def guard(recipe, name, spec, steps):
        asked.append(spec)
        return Trial(recipe=recipe, outcome=Outcome.CRASH)

    lab = SimpleNamespace(guard=guard)
    checker = GuardChecker(lab=lab, tell=lambda _: None)
    checker._baseline = tuple(SimpleNamespace(draws=each) for each in ranks)

    checker._trial(Recipe(), "candidate-1")

    assert asked[0]["draws"] is draws


class Amplified(GuardChecker):
    """Finds nothing within the limits of rounding but what moved last digits explain."""

    def _judged(self, promise, *_args, nudged=(), **_known):
        is_inside = promise is Numerics.PRECISION or nudged
        return LossCheck(status="within" if is_inside else "rejected")


def test_how_far_rounding_carries_is_asked_once_for_all_recipes(monkeypatch):
    monkeypatch.setattr("flatout.tuning.guard_checker._records", lambda _trial: (seen,))
    seen, asked = SimpleNamespace(low_precision=False, draws=False), []

    def guard(recipe, name, spec, steps):
        asked.append((name, spec.get("nudges")))
        return Trial(recipe=recipe, outcome=Outcome.OK)

    checker = Amplified(lab=SimpleNamespace(guard=guard), tell=lambda _: None)
    checker._baseline = checker._calibration = (seen,)

    checks = [checker._compare_as(Numerics.ROUNDING, recipe_of(one), ()) for one in FIVE[:2]]

    assert [check.passed for check in checks] == [True, True]
    assert asked == [("nudged", True)]
