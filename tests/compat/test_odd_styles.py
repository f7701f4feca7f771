"""Scripts of odd habits, each of which flatout once got wrong or misleading."""

import shutil
import sys

import pytest

from flatout.hardware.machine import read_machine
from flatout.planner.tracing.script import TraceRequest
from flatout.records.errors import UserError
from flatout.records.recipe import Choice, Recipe
from flatout.records.trial import Outcome, Workload
from flatout.tuning.trials import TrialOptions, run_trial
from flatout.workflow.run import run
from tests.paths import ROOT
from tests.support.programs import workload_of
from tests.support.traced import trace_memory

SCRIPTS = ROOT / "tests/scripts/public"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A user's folder, where a script is put beside nothing."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put(folder, *names):
    for name in names:
        shutil.copy(SCRIPTS / name, folder)


@pytest.mark.slow
def test_a_plan_takes_the_batch_of_the_training_and_not_of_the_evaluation(folder):
    put(folder, "short_epochs.py")

    stream = trace_memory("short_epochs.py")

    assert (stream.batch, stream.steps) == (96, 1)


@pytest.mark.slow
def test_a_batch_of_more_than_the_data_set_is_told_as_that(folder):
    put(folder, "short_epochs.py")

    with pytest.raises(UserError, match="only 96 samples, which make no batch of 1000"):
        trace_memory("short_epochs.py", request=TraceRequest(batch=1000))


@pytest.mark.slow
def test_a_plan_survives_what_libraries_ask_of_torch_when_they_are_imported(folder):
    put(folder, "kernel_library.py")

    stream = trace_memory("kernel_library.py")

    assert stream.steps > 0


def trial_of(folder, script, *arguments, steps=20):
    put(folder, script)
    workload = Workload(target=script, arguments=arguments, folder=folder, python=sys.executable)
    return run_trial(workload, Recipe(), read_machine(torch=False), TrialOptions(steps=steps))


@pytest.mark.slow
def test_a_model_that_its_first_call_completes_is_a_root_from_the_second_on(folder):
    trial = trial_of(folder, "odd_models.py", "lazy")

    assert trial.details["errors"] == []
    assert [model.parameters for model in trial.profile.models] == [16 * 32 + 32 + 32 * 4 + 4]
    assert trial.profile.phases_ms["forward"] > 0


@pytest.mark.slow
def test_a_scripted_model_is_a_root_that_nothing_compiles_again(folder):
    trial = trial_of(folder, "odd_models.py", "scripted")

    assert trial.details["errors"] == []
    assert [model.is_compiled for model in trial.profile.models] == [True]
    assert trial.profile.phases_ms["forward"] > 0


@pytest.mark.smoke
@pytest.mark.slow
def test_a_loss_that_is_no_number_is_told(folder):
    trial = trial_of(folder, "odd_models.py", "diverged")

    assert trial.outcome is Outcome.NAN
    assert "the loss was not finite at step 1" in trial.profile.notes


@pytest.mark.slow
@pytest.mark.measures  # epochs are one training where their steps take as long
def test_steps_of_an_optimizer_built_anew_in_each_epoch_all_count(folder):
    trial = trial_of(folder, "odd_models.py", "rebuilt", steps=100)

    assert trial.outcome is Outcome.OK
    assert trial.profile.backwards_per_step == 1
    steps_of_an_epoch = 512 // 32
    assert len(trial.profile.losses) > steps_of_an_epoch


@pytest.mark.slow
def test_sparse_gradients_break_no_probe(folder):
    trial = trial_of(folder, "odd_models.py", "sparse")

    assert trial.details["errors"] == []


@pytest.mark.slow
def test_training_in_another_thread_is_told_as_that(folder):
    trial = trial_of(folder, "thread_trains.py")

    assert trial.outcome is Outcome.NO_STEPS
    assert "trains in a thread of its own" in trial.message


@pytest.mark.slow
def test_sizes_that_are_numpy_s_stay_numbers(folder):
    trial = trial_of(folder, "odd_models.py", "numpy sizes")

    assert trial.profile.models[0].widest_output == 4


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_unseen"), [("another class", True), ("folds", False)])
def test_a_second_model_of_another_class_is_told_as_not_seen(folder, kind, is_unseen):
    trial = trial_of(folder, "odd_models.py", kind, steps=250)

    # Both trainings count only where their steps take about as long: no matter of this test.
    said = any("trained later was not seen" in note for note in trial.profile.notes)
    assert said == is_unseen
    assert len(trial.profile.models) == 1


@pytest.mark.slow
def test_a_model_that_trains_in_evaluation_mode_is_a_root(folder):
    profile = trial_of(folder, "odd_models.py", "evaluation mode").profile

    assert [model.parameters for model in profile.models] == [16 * 32 + 32 + 32 * 4 + 4]
    assert profile.models[0].calls_per_step == 1
    assert profile.phases_ms["forward"] > 0
    assert profile.eval_ms == 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "is_said"), [("another class", True), ("folds", False)])
def test_run_says_that_a_second_model_of_another_class_is_left_as_it_is(
    folder, capfd, kind, is_said
):
    put(folder, "odd_models.py")
    arguments = (kind,)
    workload = workload_of(folder, "odd_models.py", *arguments)

    code = run(workload, Recipe(choices=(Choice(technique="bf16_autocast"),)))

    assert code == 0
    assert ("applied to the first one only" in capfd.readouterr().err) == is_said


@pytest.mark.slow
def test_layers_called_with_symbols_are_no_training_and_no_roots(folder):
    trial = trial_of(folder, "rehearsed_calls.py")

    assert trial.outcome is Outcome.OK
    assert [model.parameters for model in trial.profile.models] == [16 * 32 + 32 + 32 * 4 + 4]
    assert trial.profile.samples_per_step == 32


@pytest.mark.slow
def test_a_loader_of_another_kind_is_told_and_its_samples_count_once(folder):
    trial = trial_of(folder, "loader_of_its_own.py")

    assert any("another kind than torch's DataLoader" in note for note in trial.profile.notes)
    assert trial.profile.samples_per_step == 32
