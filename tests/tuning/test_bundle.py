"""With too little time for one technique after the other: those on the computation go as one."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from flatout.records.ablation import LossCheck, Verdict
from flatout.records.messages import times, words
from flatout.records.profile import ModelFacts
from flatout.records.recipe import Choice
from flatout.reporting.tuning.speedup_chart import ladder_rows
from flatout.tuning import ladder as climbing
from tests.workflow.test_tune import PHASES, World, no_bundle, run, verdicts
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

FOUR = {"bf16_autocast": 0.7, "channels_last": 0.8, "fused_optimizer": 0.8, "torch_compile": 0.75}
SHORT_S = 24.0
"""Baseline, three pairs of one recipe, three to confirm it, and not enough for many more."""


@dataclass
class Clock:
    """Trials take a second each, and refusals nothing."""

    now: float = 0.0

    def __call__(self):
        return self.now


@dataclass
class Timed(World):
    """A world with its own time, and a model that any technique can act on."""

    clock: Clock = field(default_factory=Clock)

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        self.clock.now += trial.wall_s
        if trial.profile is None:
            return trial
        phases = {**PHASES, "data_wait": 0.0, "optimizer": 30.0, "backward": 48.0, "h2d": 0.0}
        scale = trial.profile.step_ms.median / sum(phases.values())
        net = ModelFacts(
            name="Net",
            parameters=10**6,
            parameter_bytes=4 * 10**6,
            dtypes=("float32",),
            conv_weights=20,
            modules=1,
        )
        facts = {
            "phases_ms": {name: ms * scale for name, ms in phases.items()},
            "models": (net,),
            "loaders": (),
        }
        return replace(trial, profile=replace(trial.profile, **facts))


def tuned(world, folder, *, techniques=tuple(FOUR), budget_s=SHORT_S):
    return run(world, folder, only=techniques, budget_s=budget_s, clock=world.clock)


def test_with_time_for_few_trials_all_that_help_are_kept_at_once(tmp_path):
    ablation = tuned(Timed(FOUR, noise=0.002), tmp_path)

    assert set(ablation.recipe.names) == set(FOUR)
    assert ablation.confirmation.ratio == pytest.approx(1 / (0.7 * 0.8 * 0.8 * 0.75), rel=0.05)
    (kept,) = ablation.kept
    assert {kept.choice.technique, *kept.together_with} == set(FOUR)


def test_one_after_the_other_there_would_be_time_for_two_at_most(tmp_path, monkeypatch):
    monkeypatch.setattr(climbing, "try_bundle", no_bundle)

    ablation = tuned(Timed(FOUR, noise=0.002), tmp_path)

    assert 1 <= len(ablation.recipe.names) <= 2
    assert any("no time" in note for note in ablation.notes)


def test_the_row_that_stands_for_all_has_the_farthest_reaching_promise(tmp_path):
    ablation = tuned(Timed(FOUR, noise=0.002), tmp_path)

    (kept,) = ablation.kept
    others = [row for row in ablation.rows if row is not kept and row.stage == "add"]
    assert (kept.choice.technique, kept.numerics) == ("bf16_autocast", "precision")
    assert {row.verdict for row in others} == {Verdict.TOGETHER}
    assert {row.why for row in others} == {
        "not tried alone; it came in together with bf16_autocast"
    }


def test_with_time_for_each_nothing_is_played_as_one(tmp_path):
    ablation = tuned(Timed(FOUR, noise=0.002), tmp_path, budget_s=1000.0)

    assert set(ablation.recipe.names) == set(FOUR)
    assert not any(row.together_with for row in ablation.rows)


def test_a_passenger_that_hurts_is_left_out_again(tmp_path):
    world = Timed(FOUR | {"channels_last": 1.2}, noise=0.002)

    ablation = tuned(world, tmp_path, budget_s=36.0)

    assert set(ablation.recipe.names) == set(FOUR) - {"channels_last"}
    dropped = [row for row in ablation.rows if row.stage == "drop"]
    assert ("channels_last", Verdict.WORSE) in {
        (row.choice.technique, row.verdict) for row in dropped
    }
    kept = {row.technique for row in ladder_rows(ablation) if row.is_kept}
    assert kept == {"baseline", "whole recipe", *ablation.recipe.names}


def test_a_technique_that_refuses_is_taken_out_and_the_others_are_played_without_it(tmp_path):
    world = Timed(FOUR, noise=0.002, refused={"channels_last": "not_applicable"})

    ablation = tuned(world, tmp_path)

    assert set(ablation.recipe.names) == set(FOUR) - {"channels_last"}
    assert verdicts(ablation)["channels_last"] is Verdict.NOT_APPLICABLE
    assert next(r.why for r in ablation.rows if r.choice.technique == "channels_last") == "no such"
    assert sum("channels_last" in label for label in world.asked) == 1


@pytest.mark.chaos
def test_a_bundle_that_crashes_is_cut_in_halves(tmp_path):
    world = Timed(FOUR, noise=0.002, broken=("torch_compile",))

    ablation = tuned(world, tmp_path, budget_s=30.0)

    first = ablation.rows[0]
    assert (first.verdict, len(first.together_with)) == (Verdict.FAILED, 3)
    assert first.why.startswith("together with ")
    assert first.why.endswith(": crash: RuntimeError: no")
    assert "torch_compile" not in ablation.recipe.names
    assert len(ablation.recipe.names) >= 2
    assert any(row.verdict is Verdict.KEPT and row.together_with for row in ablation.rows)


def test_a_bundle_that_the_guard_rejects_is_not_kept_and_its_halves_are_tried(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(
        "flatout.workflow.tune.GuardChecker.check",
        lambda _, recipe: LossCheck(
            status="rejected" if "fused_optimizer" in recipe.names else "within", why="other losses"
        ),
    )

    ablation = tuned(Timed(FOUR, noise=0.002), tmp_path, budget_s=36.0)

    assert ablation.rows[0].verdict is Verdict.REJECTED
    assert "fused_optimizer" not in ablation.recipe.names
    assert len(ablation.recipe.names) >= 2


def test_techniques_that_all_hurt_end_without_a_recipe(tmp_path):
    ablation = tuned(Timed(dict.fromkeys(FOUR, 1.1), noise=0.002), tmp_path, budget_s=30.0)

    assert ablation.recipe.choices == ()
    assert ablation.confirmation is None


def test_techniques_that_were_played_only_as_one_are_not_called_untried(tmp_path):
    ablation = tuned(Timed(dict.fromkeys(FOUR, 1.1), noise=0.002), tmp_path, budget_s=8.0)

    (note,) = [note for note in ablation.notes if "no time" in note]
    assert note.startswith("not tried alone, no time: ")
    assert all(name in note for name in FOUR)


def ended(**changes):
    """Return what is asked of a ladder whose budget ran out."""
    known = {
        "rows": [],
        "played": set(),
        "notes": [],
        "passed_over": {},
        "unscreened": [],
        "refused": {},
        "trial_s": 1.0,
        "cost_s": 6.0,
        "confirm_pairs": 3,
        "scans": SimpleNamespace(notes=list),
        "history": SimpleNamespace(takes_turns=False),
        "search": SimpleNamespace(only=()),
        "stopped": "budget",
    }
    return SimpleNamespace(**known | changes)


def test_another_setting_of_a_technique_that_was_played_is_called_untried():
    ladder = ended(
        played={"torch_compile mode=default"},
        refused={"torch_compile mode=max-autotune": "no compiler"},
    )
    choices = [
        Choice(technique="torch_compile", settings={"mode": mode})
        for mode in ("default", "max-autotune")
    ]

    climbing._note_untried(ladder, [SimpleNamespace(choice=x, ratio=1.4) for x in choices])

    assert sorted(ladder.notes[:2]) == [
        "not tried alone, no time: torch_compile mode=default (predicted 1.40x)",
        "not tried, no time: torch_compile mode=max-autotune (predicted 1.40x; in the screen: "
        "no compiler)",
    ]


def test_what_a_screen_had_no_time_for_is_called_untried():
    """The compiler is screened last; with a rival of it in the recipe no one asks for it again."""
    compiler, tried = (
        SimpleNamespace(choice=Choice(technique=name), ratio=1.2)
        for name in ("torch_compile", "bf16_autocast")
    )
    ladder = ended(played={"bf16_autocast"}, unscreened=[compiler, tried])

    climbing._note_untried(ladder, [])

    assert ladder.notes[0] == "not tried, no time: torch_compile (predicted 1.20x)"
    assert "bf16_autocast" not in " ".join(ladder.notes)


def test_what_noise_would_hide_is_told_apart_from_what_is_impossible():
    bound = words("row.bound", phases="data wait", share="20.0", ratio="1.25")
    hidden = words("row.bound_in_noise", why=bound, ratio=times(2.0))
    ladder = ended(passed_over={"ram_cache": hidden, "fused_optimizer": bound})

    climbing._note_untried(ladder, [])

    first, second = ladder.notes
    assert first.startswith("not tried, no gain that could be shown: ram_cache: data wait is")
    assert second.startswith("not tried, impossible: fused_optimizer: data wait is")


def test_of_techniques_that_exclude_each_other_one_is_in_the_bundle(tmp_path):
    world = Timed(FOUR, noise=0.002)

    tuned(
        world,
        tmp_path,
        techniques=(*FOUR, "foreach_optimizer", "fp16_autocast", "regional_compile"),
    )

    first = next(label for label in world.asked if " + " in label)
    assert "foreach_optimizer" not in first
    assert "fused_optimizer" in first


def test_a_technique_on_the_data_that_promises_more_goes_before_the_bundle(tmp_path):
    class Starved(Timed):
        def __call__(self, *asked):
            trial = World.__call__(self, *asked)
            self.clock.now += trial.wall_s
            if trial.profile is None:
                return trial
            step_ms = trial.profile.step_ms.median
            phases = dict.fromkeys(PHASES, 0.0) | {"data_wait": 0.7 * step_ms, "h2d": 0.0}
            phases |= {"forward": 0.15 * step_ms, "backward": 0.15 * step_ms}
            return replace(trial, profile=replace(trial.profile, phases_ms=phases))

    world = Starved({"loader_workers": 0.4}, noise=0.002)

    tuned(world, tmp_path, techniques=("loader_workers", "bf16_autocast", "torch_compile"))

    tried = [label for label in world.asked if label != "baseline"]
    assert tried[0].startswith("loader_workers")
