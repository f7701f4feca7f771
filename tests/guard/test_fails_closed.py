"""What the guard must refuse to judge."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flatout.agent.guard.record import GuardRecord
from flatout.guard.judge import aa
from flatout.guard.limits import EARLY_LOSSES
from flatout.records.ablation import LossCheck
from flatout.records.technique import Numerics
from tests.guard.loop import Setting, train
from tests.guard.runs import base

PROMISES = [Numerics.EXACT, Numerics.ROUNDING, Numerics.PRECISION]


def check_of(promise: Numerics = Numerics.PRECISION, **records: GuardRecord | None) -> LossCheck:
    """Judge the repeat of the small training, with some records replaced."""
    runs = base("mlp")
    return runs.check(records.pop("candidate", runs.repeat), promise, **records)


def one_step(record: GuardRecord) -> GuardRecord:
    return replace(record, gradients=tuple(s for s in record.gradients if s.step == 1))


def without_samples(record: GuardRecord) -> GuardRecord:
    return replace(record, samples={}, arguments={})


def scaled_by(record: GuardRecord, factor: float) -> GuardRecord:
    sets = (
        replace(s, sketches={name: factor * value for name, value in s.sketches.items()})
        for s in record.gradients
    )
    return replace(record, gradients=tuple(sets))


def spoiled(record: GuardRecord, value: float) -> GuardRecord:
    sets = (
        replace(s, sketches={name: np.full_like(old, value) for name, old in s.sketches.items()})
        for s in record.gradients
    )
    return replace(record, gradients=tuple(sets))


def with_start(record: GuardRecord, factor: float) -> GuardRecord:
    return replace(record, start={name: factor * v for name, v in record.start.items()})


def assert_refused(check: LossCheck, *words: str) -> None:
    assert check.status == "not_compared", check
    assert not check.passed
    for word in words:
        assert word in check.why


def test_nothing_to_object_to_is_judged() -> None:
    assert check_of().status == "same"


@pytest.mark.parametrize("promise", [Numerics.ROUNDING, Numerics.PRECISION])
def test_a_failed_calibration_is_not_compared(promise: Numerics) -> None:
    assert_refused(check_of(promise, calibration=None), "calibration trial failed")


def test_an_exact_promise_needs_no_calibration() -> None:
    assert check_of(Numerics.EXACT, calibration=None).status == "same"


def test_a_calibration_of_another_start_is_not_compared() -> None:
    calibration = with_start(base("mlp").calibration, 2.0)

    assert_refused(check_of(calibration=calibration), "calibration", "starts from other values")


def test_a_calibration_that_is_not_finite_is_not_compared() -> None:
    calibration = spoiled(base("mlp").calibration, np.inf)

    assert_refused(check_of(calibration=calibration), "calibration", "not finite")


def test_samples_that_nobody_digested_are_not_compared() -> None:
    baseline = without_samples(base("mlp").record)
    candidate = without_samples(base("mlp").repeat)

    check = check_of(
        baseline=baseline,
        candidate=candidate,
        repeat=candidate,
        calibration=without_samples(base("mlp").calibration),
    )

    assert_refused(check, "no samples were digested")


def test_samples_that_only_the_baseline_digested_are_rejected() -> None:
    check = check_of(candidate=without_samples(base("mlp").repeat))

    assert check.status == "rejected"
    assert check.worst["samples"] > 1


@pytest.mark.parametrize("side", ["baseline", "candidate"])
def test_one_step_is_not_enough(side: str) -> None:
    record = one_step(base("mlp").record)

    repeat = record if side == "baseline" else base("mlp").repeat
    assert_refused(check_of(**{side: record}, repeat=repeat), "step")


def test_gradients_that_are_all_zero_are_not_compared() -> None:
    zero = scaled_by(base("mlp").record, 0.0)

    assert_refused(check_of(baseline=zero, repeat=zero), "every gradient", "zero")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_baseline_that_is_not_finite_is_not_compared(value: float) -> None:
    broken = spoiled(base("mlp").record, value)

    assert_refused(check_of(baseline=broken), "not finite")


@pytest.mark.parametrize("promise", PROMISES)
def test_a_candidate_that_is_not_finite_is_rejected(promise: Numerics) -> None:
    check = check_of(promise, candidate=spoiled(base("mlp").repeat, np.nan))

    assert check.status == "rejected"
    assert all(np.isfinite(share) for share in check.worst.values())


def test_a_loss_that_is_not_finite_is_rejected() -> None:
    candidate = base("mlp").repeat
    losses = (*candidate.losses[:-1], float("nan"))

    check = check_of(candidate=replace(candidate, losses=losses))

    assert check.status == "rejected"
    assert "loss 20" in check.why


def test_another_thread_count_is_not_compared_unless_the_recipe_asks_for_it() -> None:
    candidate = replace(base("mlp").repeat, threads=7)

    assert_refused(check_of(candidate=candidate), "7 threads")


def test_another_torch_is_not_compared() -> None:
    assert_refused(check_of(candidate=replace(base("mlp").repeat, torch="1.0")), "torch 1.0")


def test_another_device_is_not_compared() -> None:
    assert_refused(check_of(candidate=replace(base("mlp").repeat, device="cuda")), "cuda")


def test_updates_that_only_the_baseline_could_compare_are_not_compared() -> None:
    candidate = replace(base("mlp").repeat, updates=(), update_gaps=("no such class",))

    assert_refused(check_of(candidate=candidate), "update 1", "no such class")


def test_updates_that_were_not_compared_with_the_baselines_are_not_compared() -> None:
    candidate = replace(base("mlp").repeat, has_reference=False)

    assert_refused(check_of(candidate=candidate), "did not know the baseline's optimizer")


def test_a_reference_that_cannot_be_read_is_not_compared(tmp_path: Path) -> None:
    runs = base("mlp")
    path = tmp_path / "candidate.npz"

    candidate = train(runs.case, path, reference=tmp_path / "missing.npz")

    assert_refused(check_of(candidate=candidate), "the baseline's record cannot be read")


def test_failed_probes_are_told() -> None:
    candidate = replace(base("mlp").repeat, errors=("on_batch: KeyError",))

    check = check_of(candidate=candidate)

    assert check.passed
    assert "probes failed in the recipe's trial: on_batch: KeyError" in check.why


def test_updates_that_neither_side_could_compare_are_told() -> None:
    gap = {"updates": (), "update_gaps": ("optimizer 0: no such class",)}
    runs = base("mlp")

    check = check_of(
        baseline=replace(runs.record, **gap),
        candidate=replace(runs.repeat, **gap),
        repeat=replace(runs.repeat, **gap),
    )

    assert check.passed
    assert "optimizer updates not compared: optimizer 0: no such class" in check.why


def test_an_optimizer_that_leaves_its_own_shadow_is_told() -> None:
    runs = base("mlp")
    update = runs.record.updates[0]
    strange = replace(update, tensors={"0.weight": (1.0, 1.0, 1.0, 2.0**-24)})
    baseline = replace(runs.record, updates=(strange, *runs.record.updates[1:]))

    check = check_of(baseline=baseline)

    assert check.passed
    assert "does not follow its own shadow" in check.why


def test_a_script_with_another_start_does_not_repeat() -> None:
    runs = base("mlp")
    repeat = with_start(runs.repeat, 1.5)

    assert_refused(aa(runs.record, repeat), "does not repeat", "starts from other values")
    assert_refused(check_of(repeat=repeat), "does not repeat", "loss band")


def test_a_script_with_other_samples_does_not_repeat() -> None:
    runs = base("mlp")
    marks = {"[0]": [(32, "other")]}
    repeat = replace(runs.repeat, samples={"train.py:loader": marks})

    assert_refused(aa(runs.record, repeat), "does not repeat", "batch 1")


def test_a_script_whose_gradients_move_too_much_does_not_repeat() -> None:
    runs = base("mlp")

    assert_refused(aa(runs.record, scaled_by(runs.repeat, 1.01)), "does not repeat", "gradient")


def with_losses(record: GuardRecord, first: float, later: float) -> GuardRecord:
    """Let losses differ: the first three by one share, the others by another."""
    shares = [first] * EARLY_LOSSES + [later] * (len(record.losses) - EARLY_LOSSES)
    losses = [x * (1 + share) for x, share in zip(record.losses, shares, strict=True)]
    return replace(record, losses=tuple(losses))


def test_what_training_makes_of_a_rounding_is_no_other_training() -> None:
    """On a device that does not repeat, two equal runs part after some steps."""
    runs = base("mlp")
    repeat = with_losses(runs.repeat, 1e-6, 0.1)

    def judged(first: float, later: float, promise: Numerics = Numerics.EXACT) -> LossCheck:
        candidate = with_losses(runs.repeat, first, later)
        return check_of(promise, candidate=candidate, repeat=repeat)

    assert aa(runs.record, repeat).status == "within"
    assert judged(2e-6, 0.2).passed
    assert judged(2e-6, 0.2, Numerics.ROUNDING).passed
    assert judged(1e-2, 0.1).status == "rejected"
    assert judged(2e-6, 0.5).status == "rejected"


def test_a_script_whose_later_losses_are_another_training_does_not_repeat() -> None:
    runs = base("mlp")

    repeat = with_losses(runs.repeat, 0.0, 0.6)

    assert_refused(aa(runs.record, repeat), "does not repeat", "later loss")
    early = with_losses(runs.repeat, 2e-3, 0.0)
    assert_refused(aa(runs.record, early), "does not repeat", "loss differs")


def test_a_repeat_up_to_rounding_widens_the_limits_and_says_so() -> None:
    runs = base("mlp")
    repeat = scaled_by(runs.repeat, 1 + 1e-6)
    near = scaled_by(runs.repeat, 1 + 2e-6)
    far = scaled_by(runs.repeat, 1 + 4e-6)

    assert aa(runs.record, repeat).status == "within"
    check = check_of(Numerics.EXACT, candidate=near, repeat=repeat)
    assert check.status == "within", check
    assert "limits widened" in check.why
    assert check_of(Numerics.EXACT, candidate=far, repeat=repeat).status == "rejected"


def test_a_training_technique_passes_on_purpose_but_damage_is_seen() -> None:
    runs = base("mlp")
    losses = (*runs.repeat.losses[:-1], float("inf"))

    check = check_of(Numerics.TRAINING)
    assert (check.status, check.passed) == ("on_purpose", True)
    broken = check_of(Numerics.TRAINING, candidate=replace(runs.repeat, losses=losses))
    assert broken.status == "rejected"
    rising = tuple(runs.repeat.losses[0] * (1 + n) for n in range(8))
    assert "rises" in check_of(Numerics.TRAINING, candidate=replace(runs.repeat, losses=rising)).why


@pytest.mark.parametrize(("last", "status"), [(-130.0, "on_purpose"), (100.0, "rejected")])
def test_a_log_likelihood_that_rises_above_zero_is_damage(last: float, status: str) -> None:
    runs = base("mlp")
    before = replace(runs.record, losses=(-100.0, *[-120.0] * 7))
    after = replace(runs.repeat, losses=(-100.0, *[last] * 7))

    check = check_of(Numerics.TRAINING, baseline=before, candidate=after)

    assert check.status == status


def test_a_doubled_dropout_rate_is_rejected() -> None:
    runs = base("mlp")
    candidate = replace(
        runs.repeat, structure=dict(runs.repeat.structure) | {"2": "Dropout training p=0.2"}
    )

    check = check_of(candidate=candidate)

    assert check.status == "rejected"
    assert "module 2 is 'Dropout training p=0.2', was 'Dropout training p=0.0'" in check.why


def test_a_candidate_that_stops_early_is_compared_as_far_as_it_goes() -> None:
    runs = base("mlp")

    check = runs.check(runs.run(Setting(steps=8)), Numerics.EXACT)

    assert check.status == "within"
    assert check.steps == 8


def test_one_repeat_that_hits_by_chance_leaves_room_for_a_last_digit() -> None:
    """Where the script repeats up to rounding only, a tensor may repeat exactly by luck."""
    runs = base("mlp")
    repeat = with_losses(runs.repeat, 0.0, 1e-7)
    candidate = with_losses(scaled_by(runs.repeat, 1 + 5e-7), 5e-6, 1e-7)

    assert check_of(Numerics.EXACT, candidate=candidate, repeat=repeat).status == "within"
    assert check_of(Numerics.EXACT, candidate=candidate).status == "rejected"
    far = with_losses(runs.repeat, 5e-5, 1e-7)
    assert check_of(Numerics.EXACT, candidate=far, repeat=repeat).status == "rejected"
