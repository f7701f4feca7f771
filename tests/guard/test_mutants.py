import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.agent.guard.record import GuardRecord
from flatout.records.technique import Numerics
from tests.guard.faults import FAULTS, UPDATE_FAULTS
from tests.guard.loop import Setting
from tests.guard.runs import PLAIN, base


@functools.cache
def nudged(case: str, setting: Setting) -> GuardRecord:
    """Return the record of a baseline whose inputs and weights have other last digits."""
    return base(case, setting).run(replace(setting, nudges=True, steps=3))


PAIRS = [(fault, case) for fault, item in FAULTS.items() for case in item.cases]


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_fault_is_rejected_even_by_the_widest_limits(name: str, case: str) -> None:
    fault = FAULTS[name]
    runs = base(case, fault.baseline)

    check = runs.check(runs.run(fault.setting), Numerics.PRECISION)

    assert check.status == "rejected", check
    fired = {key for key, share in check.worst.items() if share > 1}
    assert fired & fault.seen_by, check


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_fault_is_rejected_by_limits_that_this_training_widened(name: str, case: str) -> None:
    fault = FAULTS[name]
    runs = base(case, fault.baseline)

    widened = nudged(case, fault.baseline)
    check = runs.check(runs.run(fault.setting), Numerics.ROUNDING, nudged=widened)

    assert check.status == "rejected", check


@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_fault_is_rejected_under_bf16_too(name: str, case: str) -> None:
    fault = FAULTS[name]
    runs = base(case, fault.baseline)

    setting = replace(fault.setting, autocast=True, steps=fault.steps)
    check = runs.check(runs.run(setting), Numerics.PRECISION)

    assert check.status == "rejected", check


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "case"), PAIRS)
def test_a_fault_is_rejected_on_a_gpu(name: str, case: str) -> None:
    """Where gradients are summed in another order each time, the limits are wider."""
    fault = FAULTS[name]
    runs = base(case, replace(fault.baseline, device="cuda"))

    check = runs.check(runs.run(replace(fault.setting, device="cuda")), Numerics.PRECISION)

    assert check.status == "rejected", check
    fired = {key for key, share in check.worst.items() if share > 1}
    assert fired & fault.seen_by, check


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["mlp", "conv", "gpt", "lstm"])
def test_on_a_gpu_a_training_is_never_told_from_itself(case: str) -> None:
    runs = base(case, replace(PLAIN, device="cuda"))

    for _ in range(5):
        check = runs.check(runs.run(replace(PLAIN, device="cuda")), Numerics.ROUNDING)
        assert check.passed, check


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt", "lstm"])
@pytest.mark.parametrize("name", UPDATE_FAULTS)
def test_the_shadow_step_sees_a_faulty_optimizer_without_its_settings(name: str, case: str) -> None:
    runs = base(case)
    candidate = replace(runs.run(FAULTS[name].setting), optimizers=())
    baseline = replace(runs.record, optimizers=())

    check = runs.check(candidate, Numerics.PRECISION, baseline=baseline, repeat=None)

    assert check.status == "rejected", check
    assert check.worst["update"] > 1


def test_a_rejection_names_the_check_and_the_tensor() -> None:
    runs = base("gpt")
    fault = FAULTS["gradient of one tensor times 1.5"]

    check = runs.check(runs.run(fault.setting), Numerics.PRECISION)

    assert check.why.startswith("gradient: gradient before clipping of head.weight differs by 0.5")
    assert "also clipped_gradient, slope, second_gradient" in check.why


@contextmanager
def rate_halved_at(step: int) -> Iterator[None]:
    """Halve the learning rate before a step, as a schedule that runs too fast would."""
    seen = 0

    def halve(optimizer: Any, *_: Any) -> None:
        nonlocal seen
        seen += 1
        if seen == step:
            for group in optimizer.param_groups:
                group["lr"] /= 2

    hook = register_optimizer_step_pre_hook(halve)
    try:
        yield
    finally:
        hook.remove()


def test_a_rate_that_changes_in_a_later_step_is_rejected() -> None:
    runs = base("mlp")
    with rate_halved_at(15):
        candidate = runs.run(PLAIN)

    check = runs.check(candidate, Numerics.PRECISION)

    assert check.status == "rejected"
    assert check.why.startswith("settings: step 15, optimizer 0, group 0: lr is 0.0005")


def test_a_rate_that_follows_the_loss_may_fall_at_another_step() -> None:
    runs = base("mlp")
    with rate_halved_at(15):
        candidate = runs.run(PLAIN)
    with rate_halved_at(17):
        calibration = runs.run(replace(PLAIN, autocast=True))

    check = runs.check(candidate, Numerics.PRECISION, calibration=calibration)

    assert check.status == "within", check


def test_a_buffer_that_rests_by_what_was_computed_may_rest_otherwise() -> None:
    runs = base("mlp")
    known = {"buffer widest": "changes after the first step"}
    baseline = replace(runs.record, later=known)
    rests = {"buffer widest": "stays as the first step left it"}

    def judged(calibrated: dict[str, str], repeated: dict[str, str]) -> str:
        calibration = replace(runs.calibration, later=calibrated)
        repeat = replace(runs.repeat, later=repeated)
        others = {"baseline": baseline, "calibration": calibration, "repeat": repeat}
        return runs.check(replace(repeat, later=rests), Numerics.PRECISION, **others).status

    # A running extreme follows the rounding, and the untouched script in bf16 shows that.
    assert judged(rests, known) == judged(known, rests) == "same"
    assert judged(known, known) == "rejected"
