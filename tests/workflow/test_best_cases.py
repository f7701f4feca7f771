"""What the tuner does not try, and how far it searches, on trials made up from a known truth."""

from dataclasses import replace

import pytest

from flatout.records.ablation import Verdict
from flatout.records.profile import PeakBytes
from flatout.records.recipe import Choice, Recipe
from flatout.records.technique import Numerics
from flatout.tuning.guard_checker import _without_training
from tests.workflow.test_tune import PHASES, World, profile, run, verdicts
from tests.workflow.test_tune import guard_that_passes as guard_that_passes

TRAINING = Numerics.TRAINING


class Idle(World):
    """A world whose optimizer takes a fixed share of the baseline's step."""

    share = 0.003

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        step_ms = trial.profile.step_ms.median
        phases = {"optimizer": 100.0 * self.share, "h2d": 0.0, "data_wait": 0.0, "other": 0.0}
        phases["forward"] = (step_ms - phases["optimizer"]) / 3
        phases["backward"] = 2 * phases["forward"]
        return replace(trial, profile=replace(trial.profile, phases_ms=phases))


def test_a_technique_whose_best_case_could_not_show_is_named_and_not_tried(tmp_path):
    world = Idle({})

    ablation = run(world, tmp_path, only=("fused_optimizer",))

    assert ablation.rows == ()
    assert (
        "not tried, impossible: fused_optimizer: optimizer is 0.3 % of the step: at most 1.00x"
        in (ablation.notes)
    )
    assert world.asked == ["baseline"]


def test_a_technique_that_was_hopeless_is_tried_once_another_one_made_room(tmp_path):
    world = Idle({"bf16_autocast": 0.1, "fused_optimizer": 0.9})
    world.share = 0.004

    ablation = run(world, tmp_path, only=("bf16_autocast", "fused_optimizer"))

    assert verdicts(ablation) == {
        "bf16_autocast": Verdict.KEPT,
        "fused_optimizer": Verdict.KEPT,
    }
    assert not any("fused_optimizer" in note for note in ablation.notes)


class Knee(World):
    """A world in which doubling the batch pays up to 64 samples and not beyond."""

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        choice = next((c for c in trial.recipe.choices if c.technique == "batch_size"), None)
        samples = choice.settings["samples"] if choice else 16
        per_16_ms = {16: 100.0, 32: 70.0, 64: 55.0}.get(samples, 54.8)
        step_ms = trial.profile.step_ms.median * per_16_ms / 100.0 * samples / 16
        facts = replace(
            profile(step_ms),
            samples_per_step=samples,
            samples_per_s=1e3 * samples / step_ms,
            phases_ms=dict.fromkeys(PHASES, 0.0)
            | {"optimizer": step_ms / 2, "forward": step_ms / 4, "backward": step_ms / 4}
            | {"h2d": 0.0},
        )
        return replace(trial, profile=facts)


def test_the_batch_grows_to_the_knee_and_is_compared_by_equally_many_samples(tmp_path):
    ablation = run(
        Knee({}), tmp_path, only=("batch_size",), numerics=Numerics.TRAINING, budget_s=10_000.0
    )

    sizes = [(row.choice.settings["samples"], row.verdict) for row in ablation.kept]
    assert sizes == [(32, Verdict.KEPT), (64, Verdict.KEPT)]
    (choice,) = ablation.recipe.choices
    assert (choice.settings["samples"], choice.settings["learning_rate"]) == (64, "sqrt")
    assert ablation.confirmation.ratio == pytest.approx(100 / 55, rel=0.05)


def test_predictions_are_set_beside_what_was_measured(tmp_path):
    ablation = run(World({"bf16_autocast": 0.6}), tmp_path, only=("bf16_autocast",))

    (line,) = ablation.to_json()["calibration"]
    assert line["technique"] == "bf16_autocast"
    assert line["measured"] == pytest.approx(1 / 0.6, rel=0.05)
    assert line["bound"] == pytest.approx(2.0)
    assert line["predicted"] <= line["bound"]
    assert line["error"] == pytest.approx(line["measured"] / line["predicted"])


def test_techniques_beside_a_training_technique_are_compared_without_it():
    choices = [Choice(technique=name) for name in ("batch_size", "bf16_autocast", "adafactor")]

    rest = _without_training(Recipe(choices=tuple(choices)), Recipe())

    assert rest.names == ("bf16_autocast",)
    assert _without_training(rest, Recipe()) == rest


class Full(World):
    """A world whose process takes nearly all of the memory."""

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        if trial.profile is None:
            return trial
        models = tuple(replace(x, repeated_blocks=12) for x in trial.profile.models)
        peak = PeakBytes(device=int(0.9 * 2**34))
        return replace(trial, profile=replace(trial.profile, models=models, peak_bytes=peak))


def test_a_technique_that_only_saves_memory_is_tried_though_it_promises_no_time(tmp_path):
    technique = "activation_checkpointing"

    # Where nothing is open, nothing can be played together instead: that went on for all the time.
    ablation = run(Full({}), tmp_path, only=(technique,), budget_s=12.0)

    assert technique in verdicts(ablation)
    assert ablation.stopped == "finished"


class Lowered(World):
    """A script that runs in bf16 on the CPU, where compiling was seen to bring nothing so far."""

    def __call__(self, *asked):
        trial = super().__call__(*asked)
        if trial.profile is None:
            return trial
        models = tuple(replace(x, used_autocast=True) for x in trial.profile.models)
        return replace(trial, profile=replace(trial.profile, models=models))


def test_a_technique_that_is_predicted_to_bring_nothing_is_tried_while_there_is_time(tmp_path):
    ablation = run(Lowered({"torch_compile": 0.8}), tmp_path, only=("torch_compile",))

    assert verdicts(ablation) == {"torch_compile": Verdict.KEPT}
    assert ablation.rows[0].predicted_ratio == pytest.approx(1.0)


def test_what_there_was_no_time_for_is_not_called_impossible(tmp_path):
    ablation = run(Lowered({}), tmp_path, only=("torch_compile",), budget_s=0.0001)

    (note,) = [note for note in ablation.notes if note.startswith("not tried")]
    assert note.startswith("not tried, no time: torch_compile mode=default")
    assert "(predicted 1.00x)" in note


def test_a_technique_that_was_asked_for_and_finds_nothing_is_named(tmp_path):
    ablation = run(World({}), tmp_path, only=("bf16_autocast", "length_buckets"), numerics=TRAINING)

    assert (
        "not tried, impossible: length_buckets: it acts on nothing that was seen of this script on "
        "this machine"
    ) in ablation.notes
