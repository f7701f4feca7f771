"""A technique that made another one worth trying: when both are played together."""

from dataclasses import replace

from flatout.records.ablation import Verdict
from flatout.reporting.tuning.speedup_chart import ladder_rows
from flatout.tuning.state import FIRST_PAIRS
from tests.workflow.test_tune import World, run
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

TECHNIQUES = ("loader_workers", "persistent_workers")


class Restarting(World):
    """Workers that start anew in short epochs: keeping them looks worth a trial then."""

    def __call__(self, workload, recipe, machine, options):
        trial = super().__call__(workload, recipe, machine, options)
        if trial.profile is None or "loader_workers" not in recipe.names:
            return trial
        loaders = tuple(replace(x, effective_workers=2) for x in trial.profile.loaders)
        facts = {"epoch_start_ms": 60.0, "epoch_steps": 20, "loaders": loaders}
        return replace(trial, profile=replace(trial.profile, **facts))


def test_a_technique_that_looks_faster_is_proven_before_its_companion_is_tried(tmp_path):
    ablation = run(Restarting({"loader_workers": 0.7}, noise=0.03), tmp_path, only=TECHNIQUES)

    first = ablation.rows[0]
    assert (first.choice.technique, first.verdict) == ("loader_workers", Verdict.KEPT)
    assert first.together_with == ()


def test_one_that_does_not_is_played_together_with_it(tmp_path):
    ablation = run(Restarting({"persistent_workers": 0.7}, noise=0.01), tmp_path, only=TECHNIQUES)

    both = next(row for row in ablation.rows if row.verdict is Verdict.KEPT)
    assert both.choice.technique == "persistent_workers"
    assert both.together_with == ("loader_workers",)
    alone, *_ = ablation.rows
    assert (alone.choice.technique, alone.verdict) == ("loader_workers", Verdict.TOGETHER)
    kept = {row.technique for row in ladder_rows(ablation) if row.is_kept}
    assert kept == {"baseline", "whole recipe", *ablation.recipe.names}


def test_one_that_stays_open_after_its_companion_failed_gets_its_other_pairs(tmp_path):
    factors = {"loader_workers": 0.94, "persistent_workers": 1.5}
    world = Restarting(factors, noise=0.04, seed=6)

    ablation = run(world, tmp_path, only=TECHNIQUES, budget_s=6000.0)

    alone = [row for row in ablation.rows if row.choice.technique == "loader_workers"]
    assert any(row.together_with for row in ablation.rows)  # the companion was played
    assert max(row.comparison.n for row in alone) > FIRST_PAIRS
