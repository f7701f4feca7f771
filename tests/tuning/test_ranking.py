"""In which order techniques are tried, and what a tuning makes of its time."""

import statistics
from dataclasses import replace

import pytest

from flatout.records.messages import words
from flatout.records.profile import Bound
from flatout.records.recipe import Choice
from flatout.records.technique import Effect, Numerics
from flatout.tuning.ranking import Candidate, Experience, Search, find_beyond
from flatout.workflow.tune import TuneOptions, tune
from tests.support.starved import StarvedWorld
from tests.techniques.facts import loader, model, profile
from tests.workflow.test_tune import MACHINE, WORKLOAD

NOTHING_KNOWN = Experience()


def candidate(ratio, experience=NOTHING_KNOWN, family="data", startup_s=0.0):
    return Candidate(
        choice=Choice(technique="any"),
        numerics=Numerics.EXACT,
        effect=Effect(startup_s=startup_s),
        ratio=ratio,
        bound=Bound(ratio=ratio, share=0.5, why=""),
        family=family,
        cost_s=experience.cost_s(family, startup_s),
        trust=experience.trust_in(family),
    )


def test_a_family_that_disappointed_is_ranked_behind_a_lesser_promise():
    disappointed = Experience(outcomes={"data": [(3.3, 1.1)]})

    promise, modest = candidate(1.6, disappointed), candidate(1.2, disappointed, "precision")

    assert promise.hope_per_s < modest.hope_per_s
    assert candidate(1.6).hope_per_s > candidate(1.2, family="precision").hope_per_s


def test_a_family_that_made_things_slower_keeps_a_small_hope():
    slower = Experience(outcomes={"compile": [(1.5, 0.6), (1.4, 0.7)]})

    assert 0 < slower.trust_in("compile") < 0.2


def test_what_takes_long_to_try_comes_later():
    assert candidate(1.2, startup_s=60.0).hope_per_s < candidate(1.15).hope_per_s


def test_the_compile_cache_makes_later_trials_cheap():
    cost = Experience(trial_s=5.0).cost_s

    assert cost("compile", 20.0) < cost("data", 20.0)


PADDING = ("length_buckets", "dynamic_padding", "sequence_packing")
PADDED = profile(loaders=(loader(pad_share=0.75),), models=(model(input_shapes=1),))


def search(**changes):
    return Search(machine=MACHINE, **{"ceiling": Numerics.PRECISION} | changes)


def test_the_most_promising_change_of_the_data_that_may_not_be_tried_is_named():
    found = find_beyond(PADDED, search())

    assert found.choice.technique in PADDING
    assert found.ratio > 1.5
    assert "75%" in found.effect.why


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (profile(), {}),
        (PADDED, {"ceiling": Numerics.TRAINING}),
        (PADDED, {"only": ("fused_optimizer",)}),
        (PADDED, {"skip": PADDING}),
        (replace(PADDED, loaders=(loader(pad_share=0.02),)), {}),
    ],
)
def test_nothing_is_named_that_was_tried_or_promises_little(seen, changes):
    assert find_beyond(seen, search(**changes)) is None


def tuned(world, folder, monkeypatch, **options):
    """Tune in the world's own time, with a guard that lets everything pass."""
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check", lambda _, recipe: world.check(recipe)
    )
    asked = TuneOptions(out=folder, runner=world, clock=lambda: world.now, **options)
    return tune(WORKLOAD, asked, lambda _: None, MACHINE)


class TwoHalfHearted(StarvedWorld):
    """Two numbers of workers that look like a small gain each, and no other technique that does."""

    def true_ratio(self, names):
        return 1.03 if "loader_workers" in names else 1.0


def test_two_open_settings_of_one_technique_are_not_played_together(tmp_path, monkeypatch):
    only = ("loader_workers", "channels_last")
    worlds = [TwoHalfHearted(seed) for seed in range(6)]

    ablations = [
        tuned(world, tmp_path / str(world.seed), monkeypatch, budget_s=400.0, only=only)
        for world in worlds
    ]

    played = {row.choice.label for ablation in ablations for row in ablation.rows}
    assert len([label for label in played if label.startswith("loader_workers")]) > 1


def test_starved_job_is_made_fast_within_five_minutes(tmp_path, monkeypatch):
    worlds = [StarvedWorld(seed) for seed in (0, 3, 10)]

    found = [
        tuned(world, tmp_path / str(world.seed), monkeypatch, budget_s=300.0, accepts_load=True)
        for world in worlds
    ]

    ratios = [w.true_ratio(a.recipe.names) for w, a in zip(worlds, found, strict=True)]
    tried = [{row.choice.technique for row in ablation.rows} for ablation in found]
    assert statistics.median(ratios) >= 1.8
    assert all({"loader_workers", "bf16_autocast"} <= names for names in tried)
    assert max(world.now for world in worlds) < 330.0


def test_budget_too_short_for_a_proof_still_looks_at_one_technique_and_says_what_it_takes(
    tmp_path, monkeypatch
):
    world, techniques = StarvedWorld(0), ("bf16_autocast", "channels_last")

    ablation = tuned(world, tmp_path, monkeypatch, budget_s=30.0, only=techniques)

    assert len(ablation.rows) == 1
    assert world.now < 30.0
    assert any("to prove one technique takes about" in note for note in ablation.notes)


def test_a_best_case_that_only_noise_hides_is_not_called_impossible():
    why = words("row.bound", phases="data wait", share="20.0", ratio="1.25")
    some = replace(candidate(1.25), bound=Bound(ratio=1.25, share=0.2, why=why))

    assert some.find_reason_against(1.0) is None
    assert some.find_reason_against(2.0) == (
        "data wait is 20.0 % of the step: at most 1.25x, and less than 2.00x cannot be shown at "
        "this machine's noise"
    )
