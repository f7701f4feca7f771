"""Scripts off the beaten track: own update rules, odd batches, endings in the middle."""

import tempfile
from pathlib import Path

import pytest

from flatout.records.trial import Outcome
from flatout.tuning.guard_checker import GuardChecker
from flatout.tuning.trial_runner import TrialRunner
from tests.support.programs import workload_of
from tests.support.trial_runs import copy_scripts, machine, profile_of, recipe_of, trial_of

pytestmark = pytest.mark.slow


def test_gradient_by_autograd_grad_ends_a_step_where_there_is_no_optimizer():
    profile = profile_of("own_update.py")

    assert profile.backwards_per_step == 1
    assert profile.samples_per_step == 4
    assert profile.phases_ms["backward"] > 0
    assert profile.losses


def test_marked_steps_override_those_that_were_found():
    profile = profile_of("own_update.py --marked")

    assert profile.backwards_per_step == 2
    assert profile.samples_per_step == 8
    assert sum(profile.phases_ms.values()) == pytest.approx(profile.step_ms.median)


def test_script_without_edges_is_told_how_to_mark_its_steps():
    trial = trial_of("own_update.py --functional")

    assert trial.outcome is Outcome.NO_STEPS
    assert "with flatout.step():" in trial.message


def test_functional_gradients_are_measured_with_marks():
    profile = profile_of("own_update.py --functional --marked")

    assert profile.samples_per_step == 8
    assert profile.phases_ms["backward"] > 0


@pytest.mark.parametrize(("how", "samples"), [("two_loaders", 18), ("tensor_dict", 6)])
def test_batches_of_odd_kinds_are_counted(how, samples):
    profile = profile_of(f"odd_batches.py {how}")

    assert profile.samples_per_step == samples


def test_both_loaders_that_feed_a_step_are_seen():
    profile = profile_of("odd_batches.py two_loaders")

    assert {loader.batch_size for loader in profile.training_loaders} == {6, 12}
    assert profile.batches_per_step == 2


@pytest.mark.parametrize("kind", ["copy", "averaged", "inside", "compiled"])
def test_an_evaluation_with_another_model_than_the_one_that_trains_is_one(kind):
    trial = trial_of(f"evaluates_copy.py {kind}", steps=60)

    assert trial.outcome is Outcome.OK, trial.message
    assert trial.profile.eval_share > 0
    assert trial.profile.eval_ms == 0
    assert [loader.batch_size for loader in trial.profile.training_loaders] == [6]
    assert trial.profile.epoch_steps == 16
    assert trial.profile.compiling is None or not trial.profile.compiling.recompiles


def test_a_teacher_that_every_step_calls_is_a_part_of_the_step():
    profile = trial_of("evaluates_copy.py teacher", steps=60).profile

    assert profile.eval_ms > 0
    assert profile.samples_per_step == 6
    assert any("trains nothing" in note for note in profile.notes)


@pytest.mark.parametrize("place", ["", "thread"])
def test_optimizers_that_step_inside_backward_make_one_step_of_each(place):
    profile = profile_of(f"steps_in_backward.py {place}")

    assert profile.backwards_per_step == profile.batches_per_step == 1
    assert profile.samples_per_step == 6
    assert profile.epoch_steps == 16
    assert len(profile.optimizers) == 4


@pytest.mark.parametrize("part", ["loss", "step", "whole"])
def test_what_runs_in_a_function_that_the_script_compiles_is_seen(part):
    profile = profile_of(f"compiled_functions.py {part}")

    phases = profile.phases_ms
    assert phases["forward"] > 0
    assert (phases["optimizer"] > 0, phases["backward"] > 0) == (part != "whole",) * 2
    assert phases["other"] < 0.5 * profile.step_ms.median
    assert profile.backwards_per_step == profile.batches_per_step == 1
    assert profile.samples_per_step == 6
    assert profile.epoch_steps == 16
    assert [model.parameters for model in profile.models] == [68_867]
    assert profile.models[0].is_compiled == (part != "step")


@pytest.mark.parametrize(("part", "status"), [("loss", "within"), ("whole", "not_compared")])
def test_the_guard_compares_what_a_compiled_function_trains(part, status):
    workload = workload_of(copy_scripts(), "compiled_functions.py", part)
    out = Path(tempfile.mkdtemp(prefix="flatout-test-"))
    runner = TrialRunner(workload=workload, machine=machine(), out=out, limit_s=200.0)

    check = GuardChecker(runner, lambda _: None).check(recipe_of("bf16_autocast"))

    assert (check.status, check.passed) == (status, part == "loss"), check.why


def test_a_loop_within_a_loop_makes_one_step_of_a_task():
    trial = trial_of("inner_loop.py", steps=60)

    assert trial.outcome is Outcome.OK, trial.message
    assert trial.profile.backwards_per_step == 3
    assert [model.calls_per_step for model in trial.profile.models] == [2, 1]
    assert sorted(optimizer.name for optimizer in trial.profile.optimizers) == ["Adam", "SGD"]


def test_a_training_that_goes_on_from_a_file_has_one_model_and_whole_steps():
    profile = profile_of("restored.py")

    assert [(model.name, model.calls_per_step) for model in profile.models] == [("Net", 1)]
    assert [optimizer.name for optimizer in profile.optimizers] == ["Adam"]
    assert profile.samples_per_step == 6
    assert profile.backwards_per_step == profile.batches_per_step == 1
    assert profile.phases_ms["forward"] > 0


@pytest.mark.parametrize(
    ("kind", "sizes", "note"),
    [
        ("cycle", [6], ""),
        ("list", [6], ""),
        ("own", [], "no DataLoader fed the training"),
        ("thread", [], "in a thread of the script's own"),
    ],
)
def test_samples_and_loaders_are_those_of_the_training_however_its_batches_come(kind, sizes, note):
    trial = trial_of(f"odd_feeding.py {kind}", steps=100)

    assert trial.outcome is Outcome.OK, trial.message
    profile = trial.profile
    assert profile.samples_per_step == 6
    assert [loader.batch_size for loader in profile.training_loaders] == sizes
    assert any(note in told for told in ("", *profile.notes))


@pytest.mark.parametrize("most", ["", "3", "1"])
def test_a_loader_of_an_evaluation_before_the_batch_is_used_feeds_no_step(most):
    profile = profile_of(f"evaluates_first.py {most}")

    assert [loader.batch_size for loader in profile.training_loaders] == [6]
    assert profile.epoch_steps == 8


def test_a_step_that_raises_is_none_and_those_after_it_are_seen():
    trial = trial_of("raising_step.py", steps=20)

    assert trial.outcome is Outcome.OK, trial.message
    assert len(trial.profile.losses) >= 20
    assert trial.profile.backwards_per_step == 1


def test_list_of_images_counts_images_rather_than_channels():
    profile = profile_of("odd_batches.py images")

    assert profile.samples_per_step == 6


def test_a_closure_that_is_called_again_adds_no_samples_and_no_loss():
    profile = profile_of("closure.py")

    assert profile.backwards_per_step > 1
    assert profile.samples_per_step == 16
    assert profile.losses[0] == 1.0


def test_a_closure_that_goes_backward_twice_adds_both_terms():
    profile = profile_of("closure_terms.py")

    assert profile.backwards_per_step == 2
    assert profile.losses[0] == 1.0 + 4.0


def test_a_trial_ends_whatever_the_script_has_for_stdout():
    trial = trial_of("own_stdout.py", steps=20)

    assert trial.outcome is Outcome.OK, trial.message
    assert trial.details["exit_code"] == 0


def test_calls_are_counted_for_each_root():
    profile = profile_of("gan.py")

    assert [model.calls_per_step for model in profile.models] == [3, 1]


@pytest.mark.parametrize(
    ("ending", "outcome", "words"),
    [
        ("SIGTERM", Outcome.CRASH, "signal 15"),
        ("SIGKILL", Outcome.OOM, "killed"),
        ("raise", Outcome.CRASH, "the validation set is empty"),
    ],
)
def test_script_that_is_ended_midway_leaves_what_was_seen(ending, outcome, words):
    trial = trial_of(f"ended_late.py {ending}", steps=1_000_000)

    assert trial.outcome is outcome
    assert words in trial.message
    assert trial.profile is None
    assert trial.partial.step_ms.median > 0
    assert any("did not end well" in note for note in trial.partial.notes)


@pytest.mark.chaos
def test_killed_script_says_what_is_not_available():
    trial = trial_of("ended_late.py SIGKILL", steps=1_000_000)

    assert trial.partial.losses == ()
    assert any("losses, device times" in note for note in trial.partial.notes)
