"""The whole recipe against the baseline, when the budget is gone by then."""

from dataclasses import dataclass, replace

from flatout.reporting.tuning.verdict import HERE, next_command
from flatout.tuning.ladder import climb
from tests.workflow.test_tune import World, no_bundle, profile, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes


@dataclass
class LateWorld(World):
    """A world whose clock stands still until techniques are kept, and is past the budget from then
    on.

    The first trial of the recipe after that is disturbed.
    """

    late: float = 1.0
    """By how much."""
    now_s: float = 0.0

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        if self.now_s and recipe.choices and trial.profile and self.late != 1.0:
            trial = replace(trial, profile=profile(trial.profile.step_ms.median * self.late))
            self.late = 1.0
        return trial


BOTH = ("bf16_autocast", "loader_workers")
"""What was the only one to race needs no confirmation after its race."""


def late_tuning(world, tmp_path, monkeypatch):
    def climbed(ladder):
        yield from climb(ladder)
        world.now_s = 580.0  # of 600, of which the stages have the last

    monkeypatch.setattr("flatout.tuning.policy.climb", climbed)
    monkeypatch.setattr("flatout.tuning.policy._drop_one", no_bundle)
    return run(world, tmp_path, only=BOTH, clock=lambda: world.now_s)


def test_one_disturbed_trial_at_the_end_does_not_cost_the_recipe(tmp_path, monkeypatch):
    ablation = late_tuning(
        LateWorld({"bf16_autocast": 0.7, "loader_workers": 0.7}, late=1.8), tmp_path, monkeypatch
    )

    assert {*ablation.recipe.names} == {*BOTH}
    assert 3 < ablation.confirmation.n <= 6


def test_a_recipe_that_promises_nothing_any_more_gets_no_time_beyond_the_budget(
    tmp_path, monkeypatch
):
    ablation = late_tuning(
        LateWorld({"bf16_autocast": 0.94, "loader_workers": 0.94}, late=1.4), tmp_path, monkeypatch
    )

    assert ablation.recipe.names == ()
    assert ablation.confirmation.n == 3
    assert "the budget ran out" in ablation.notes[-1]


def test_a_confirmation_that_the_budget_ended_is_called_so_and_can_go_on(tmp_path, monkeypatch):
    ablation = late_tuning(
        LateWorld({"bf16_autocast": 0.94, "loader_workers": 0.94}, late=1.4), tmp_path, monkeypatch
    )

    assert ablation.stopped == "budget"
    assert next_command(ablation, HERE).startswith("flatout tune --resume")
