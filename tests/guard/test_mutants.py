from dataclasses import replace

import pytest

from flatout.core.technique import Numerics
from flatout.guard.judge import judge
from tests.guard.faults import FAULTS, UPDATE_FAULTS
from tests.guard.runs import base

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
def test_a_fault_is_rejected_under_bf16_too(name: str, case: str) -> None:
    fault = FAULTS[name]
    runs = base(case, fault.baseline)

    check = runs.check(runs.run(replace(fault.setting, autocast=True, steps=5)), Numerics.PRECISION)

    assert check.status == "rejected", check


@pytest.mark.parametrize("case", ["mlp", "conv", "gpt", "lstm"])
@pytest.mark.parametrize("name", UPDATE_FAULTS)
def test_the_shadow_step_sees_a_faulty_optimizer_without_its_settings(name: str, case: str) -> None:
    runs = base(case)
    candidate = runs.run(FAULTS[name].setting)

    check = judge(
        replace(runs.record, optimizers=()),
        replace(candidate, optimizers=()),
        calibration=runs.calibration,
        repeat=None,
        promise=Numerics.PRECISION,
    )

    assert check.status == "rejected", check
    assert check.worst["update"] > 1


def test_a_rejection_names_the_check_and_the_tensor() -> None:
    runs = base("gpt")
    fault = FAULTS["gradient of one tensor times 1.5"]

    check = runs.check(runs.run(fault.setting), Numerics.PRECISION)

    assert check.why.startswith("gradient: gradient before clipping of head.weight differs by 0.5")
    assert "also clipped_gradient, slope, second_gradient" in check.why
