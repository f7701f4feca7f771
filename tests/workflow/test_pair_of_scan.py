"""Workers and fewer threads that a scan saw to help together: both are tried at once."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from flatout.records.ablation import Verdict
from flatout.records.recipe import Recipe
from flatout.records.technique import Numerics
from flatout.records.trial import Outcome, Trial
from flatout.tuning.bundle import find_bundle
from tests.workflow.test_tune import World, run, verdicts
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

BOTH = ("loader_workers", "cpu_threads")


@dataclass
class Shared(World):
    """Two cores: workers bring nothing until the training's threads leave them one."""

    pair: float = 0.6
    """Factor of the step with both; fewer threads without workers make it longer."""

    def __call__(self, workload, recipe, machine, options):
        if options.probes and "worker_scan" in options.probes:
            visits = [self.visit(0, 0, 100.0), self.visit(2, 0, 99.0)]
            visits += [
                self.visit(n, threads, 60.0)
                for n, _, threads in options.probes["worker_scan"]["visits"]
                if threads and n == 2
            ]
            seen = {"visits": visits, "epoch_batches": None, "stopped": ""}
            found = {"probes": {"worker_scan": seen}}
            return Trial(recipe=recipe, outcome=Outcome.OK, wall_s=1.0, details=found)
        known = self.factors
        threads = self.pair if "loader_workers" in recipe.names else 1.2
        self.factors = known | {"cpu_threads": threads}
        try:
            return super().__call__(workload, recipe, machine, options)
        finally:
            self.factors = known

    def visit(self, workers, threads, batch_ms):
        pace = {"num_workers": workers, "threads": threads, "batch_ms": batch_ms}
        return pace | {"prefetch_factor": 2, "start_ms": 10.0}


def test_both_are_played_first_and_as_one(tmp_path):
    world = Shared({"bf16_autocast": 0.9})

    ablation = run(world, tmp_path)

    first, second = ablation.rows[:2]
    assert (first.choice.technique, first.why) == (
        "loader_workers",
        "not tried alone; it came in together with cpu_threads",
    )
    assert (second.choice.technique, second.verdict) == ("cpu_threads", Verdict.KEPT)
    assert second.predicted_ratio == pytest.approx(100 / 60)
    assert {choice.technique: choice.settings for choice in ablation.recipe.choices} == {
        "loader_workers": {"num_workers": 2, "prefetch_factor": 2},
        "cpu_threads": {"threads": 1},
        "bf16_autocast": {},
    }
    # Two settings of the workers on their own would have cost six trials each.
    played = next(label for label in world.asked if label != "baseline")
    assert "loader_workers" in played
    assert "cpu_threads" in played
    assert verdicts(ablation)["bf16_autocast"] is Verdict.KEPT


def test_a_pair_that_does_not_hold_in_fresh_pairs_is_not_kept(tmp_path):
    ablation = run(Shared({}, pair=1.3), tmp_path, only=(*BOTH, "bf16_autocast"))

    assert not set(BOTH) & set(ablation.recipe.names)
    row = next(row for row in ablation.rows if row.together_with)
    assert (row.verdict, row.together_with) == (Verdict.WORSE, ("loader_workers",))
    # Workers alone were seen to bring nothing, and threads alone leave no one a core.
    assert sum("cpu_threads" in label for label in ablation_labels(ablation)) == 1


def ablation_labels(ablation):
    return [row.choice.label for row in ablation.rows]


@pytest.mark.parametrize(
    "limits",
    [
        {"skip": ("cpu_threads",)},
        {"numerics": Numerics.EXACT},
        {"only": BOTH[:1]},
        {"only": BOTH, "skip": ("cpu_threads",)},
    ],
)
def test_threads_that_may_not_be_changed_are_in_no_pair(tmp_path, limits):
    world = Shared({})

    ablation = run(world, tmp_path, **limits)

    assert "cpu_threads" not in ablation.recipe.names
    assert not any("cpu_threads" in label for label in world.asked)


@dataclass
class Timed(Shared):
    """Trials take six seconds."""

    now: float = 0.0

    def __call__(self, *asked):
        trial = replace(super().__call__(*asked), wall_s=6.0)
        self.now += trial.wall_s
        return trial


@pytest.mark.parametrize("bundles", [None, [], [frozenset({"bf16_autocast", "tf32"})]])
def test_a_pair_of_a_late_scan_is_played_whatever_was_played_as_one_before(bundles):
    pair = [
        SimpleNamespace(choice=SimpleNamespace(technique=n, label=n), cost_s=1.0, is_promising=True)
        for n in BOTH
    ]
    ladder = SimpleNamespace(
        bundles=bundles,
        has_played_pair=False,
        recipe=Recipe(),
        budget=SimpleNamespace(left_s=1e9),
        history=SimpleNamespace(guard_cost_s=lambda default: default),
        confirm_pairs=3,
        trial_s=1.0,
    )

    assert find_bundle(ladder, [], pair) == pair
    ladder.has_played_pair = True
    assert find_bundle(ladder, [], pair) == []


def tuned(world, folder, budget_s):
    techniques = (*BOTH, "bf16_autocast", "fused_optimizer")
    return run(world, folder, only=techniques, budget_s=budget_s, clock=lambda: world.now)


def test_with_little_time_techniques_on_the_computation_join_the_pair(tmp_path):
    world = Timed({"bf16_autocast": 0.7}, noise=0.002)

    ablation = tuned(world, tmp_path, 150.0)

    (kept,) = ablation.kept
    assert kept.choice.technique == "bf16_autocast"
    assert set(kept.together_with) >= set(BOTH)
    assert ablation.confirmation.ratio == pytest.approx(1 / (0.6 * 0.7), rel=0.1)


def played(world):
    """Return what was tried, each recipe once, in order."""
    return [label for label in dict.fromkeys(world.asked) if label != "baseline"]


def test_a_bundle_that_does_not_hold_is_cut_beside_the_pair(tmp_path):
    world = Timed({"bf16_autocast": 2.0, "fused_optimizer": 1.0}, noise=0.002)

    ablation = tuned(world, tmp_path, 150.0)

    first, second = played(world)[:2]
    assert first.count(" + ") >= 2
    assert second.count(" + ") == 1
    assert all(name in second for name in BOTH)
    assert set(ablation.recipe.names) == set(BOTH)


def test_a_pair_that_refuses_leaves_the_others(tmp_path):
    world = Timed({"bf16_autocast": 0.7}, noise=0.002, refused={"loader_workers": "not_applicable"})

    ablation = tuned(world, tmp_path, 150.0)

    assert "bf16_autocast" in ablation.recipe.names
    assert not set(BOTH) & set(ablation.recipe.names)
    assert not any("cpu_threads" in label for label in played(world)[1:])
