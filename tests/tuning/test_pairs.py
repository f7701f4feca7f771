"""What a recipe's trial is compared by."""

from dataclasses import replace

import pytest

from flatout.records.ablation import Verdict
from flatout.records.messages import messages
from flatout.records.trial import Outcome, Trial
from flatout.reporting.tuning.verdict import headline
from flatout.tuning.pairs import pace_ms
from tests.techniques.facts import profile
from tests.workflow.test_tune import World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

BASE = replace(profile(), samples_per_step=16.0)


@pytest.mark.parametrize(
    ("samples", "expected_ms"),
    [(16.0, 100.0), (15.5, 100.0), (0.0, 100.0), (32.0, 50.0), (8.0, 200.0)],
)
def test_steps_are_compared_by_the_time_for_equally_many_samples(samples, expected_ms):
    candidate = replace(profile(), samples_per_step=samples)

    assert pace_ms(candidate, BASE) == pytest.approx(expected_ms)


def test_unknown_samples_compare_whole_steps():
    assert pace_ms(replace(BASE, samples_per_step=64.0), profile()) == 100.0


class Unlucky(World):
    """The unchanged script ends badly in these of its runs."""

    bad = ()

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        if not recipe.names and not options.probes and self.asked.count(recipe.label) in self.bad:
            return Trial(recipe=recipe, outcome=Outcome.CRASH, message="port in use", wall_s=1.0)
        return trial


def test_a_run_of_the_unchanged_script_that_fails_says_nothing_of_a_technique(tmp_path):
    world = Unlucky({"loader_workers": 0.5})
    world.bad = (2,)

    ablation = run(world, tmp_path, only=("loader_workers",))

    assert ablation.recipe.names == ("loader_workers",)
    assert ablation.confirmation.ratio == pytest.approx(2, rel=0.1)


def test_a_script_that_no_longer_runs_is_named_and_not_the_technique(tmp_path):
    world = Unlucky({"loader_workers": 0.5})
    world.bad = range(2, 99)

    ablation = run(world, tmp_path, only=("loader_workers",))

    row = next(row for row in ablation.rows if row.choice.technique == "loader_workers")
    assert row.verdict is Verdict.INCONCLUSIVE
    assert row.why == "it was not measured: without it the script ended with crash: port in use"


def test_a_recipe_that_fails_when_it_is_confirmed_has_an_answer_of_its_own(tmp_path):
    class Flaky(World):
        def __call__(self, workload, recipe, machine, options):
            trial = super().__call__(workload, recipe, machine, options)
            if len(recipe.names) == 2 and self.asked.count(recipe.label) > 4:
                return Trial(recipe=recipe, outcome=Outcome.CRASH, message="no memory", wall_s=1.0)
            return trial

    world = Flaky({"loader_workers": 0.5, "fused_optimizer": 0.6})

    ablation = run(world, tmp_path, only=("loader_workers", "fused_optimizer"))

    assert ablation.stopped == "recipe failed"
    said = messages("en").text(headline(ablation))
    assert said.startswith("No answer yet")
    assert "the recipe did not run when it was to be confirmed" in said
