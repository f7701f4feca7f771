"""A run that skips most of its short steps reports the same as one that samples each."""

import pytest

from flatout.records.profile import MAX_STEPS_KEPT
from flatout.records.trial import Outcome
from tests.support.trial_runs import trial_of

pytestmark = pytest.mark.slow

ANY = 1_000.0
"""Seconds: every step is a short one, however busy the machine is."""
STEPS = 60
"""Of each trial: as many on a busy machine, where few fit into a time."""


def played(command, below_s):
    return trial_of(command, skips_below_s=below_s, steps=STEPS)


@pytest.mark.parametrize("command", ["plain_loop.py", "accumulation.py"])
def test_a_run_that_skips_steps_knows_what_one_that_samples_all_knows(command):
    skipping, sampling = (played(command, below_s) for below_s in (ANY, 0.0))

    assert skipping.outcome is sampling.outcome is Outcome.OK
    assert skipping.details["errors"] == []
    found, wanted = skipping.profile, sampling.profile
    assert len(found.steps_ms) < 0.6 * found.step_ms.n
    assert len(wanted.steps_ms) == min(wanted.step_ms.n, MAX_STEPS_KEPT)
    for name in ("samples_per_step", "batches_per_step", "backwards_per_step", "epoch_steps"):
        assert getattr(found, name) == getattr(wanted, name)
    assert found.models[0].calls_per_step == wanted.models[0].calls_per_step
    assert sum(found.phases_ms.values()) == pytest.approx(found.step_ms.median)
    assert min(found.phases_ms[name] for name in ("forward", "backward", "optimizer")) > 0


def test_evaluation_and_new_epochs_are_seen_in_skipped_steps():
    skipping = played("plain_loop.py", ANY).profile

    training, evaluation = skipping.loaders
    assert (training.is_training, evaluation.is_training) == (True, False)
    assert training.epochs_started > 1
    drawn = training.batches_drawn / training.epochs_started
    assert drawn == pytest.approx(skipping.epoch_steps, rel=0.2)


def test_an_evaluation_amid_an_epoch_leaves_its_batches_to_its_own_loader():
    profile = played("evaluates_copy.py averaged", ANY).profile

    training, evaluation = profile.loaders
    assert len(profile.steps_ms) < 0.6 * profile.step_ms.n
    # Of each evaluation, every fifth step, twenty are used and one more is drawn.
    evaluations, rest = divmod(evaluation.batches_drawn, 21)
    assert rest == 0
    assert evaluations in range(training.batches_drawn // 5 - 1, training.batches_drawn // 5 + 1)
    assert [loader.batch_size for loader in profile.training_loaders] == [6]


def test_a_training_that_follows_another_one_is_seen_though_steps_are_skipped():
    trial = played("folds.py", ANY)

    assert trial.outcome is Outcome.OK, trial.message
    assert len(trial.profile.models) == len(trial.profile.optimizers) == 1
    assert trial.profile.models[0].calls_per_step == 1
    assert trial.profile.phases_ms["forward"] > 0
    assert trial.profile.samples_per_step == 8


def test_the_ends_of_epochs_are_seen_in_skipped_steps():
    training, _ = played("plain_loop.py", ANY).profile.loaders

    assert training.epochs_started > 3
    assert len(training.epoch_samples) == training.epochs_started - 1


def test_an_optimizer_that_steps_another_ends_one_skipped_step():
    skipping, sampling = (played("nested_optimizers.py", below_s) for below_s in (ANY, 0.0))

    assert skipping.details["errors"] == []
    found, wanted = skipping.profile, sampling.profile
    assert len(found.steps_ms) < 0.6 * found.step_ms.n
    for name in ("samples_per_step", "batches_per_step", "backwards_per_step", "epoch_steps"):
        assert getattr(found, name) == getattr(wanted, name)
    assert found.phases_ms["optimizer"] > 0


def test_steps_of_several_optimizers_are_never_skipped():
    gan = played("gan.py", ANY).profile

    assert len(gan.steps_ms) == min(gan.step_ms.n, MAX_STEPS_KEPT)
