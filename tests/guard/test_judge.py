"""Single checks of the judge, on records with one thing changed."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from flatout.agent.guard.record import GuardRecord, Sketches
from flatout.guard.limits import COLUMNS, GRADIENT_CEILING
from flatout.records.ablation import LossCheck
from flatout.records.technique import Numerics
from tests.guard.runs import Base, base

LOADER = "train.py:loader"


def with_gradients(
    record: GuardRecord, change: Callable[[str, np.ndarray], np.ndarray], *, step: int, point: str
) -> GuardRecord:
    """Change the sketches of one gradient."""

    def changed(sketches: Sketches) -> Sketches:
        return {name: change(name, value) for name, value in sketches.items()}

    sets = (
        replace(s, sketches=changed(s.sketches)) if (s.step, s.point) == (step, point) else s
        for s in record.gradients
    )
    return replace(record, gradients=tuple(sets))


def fired(runs: Base, candidate: GuardRecord, promise: Numerics) -> set[str]:
    """Return the checks that reject a candidate."""
    check = runs.check(candidate, promise)
    return {name for name, share in check.worst.items() if share > 1}


def norm_of(record: GuardRecord) -> float:
    return float(np.sqrt(sum(value @ value for value in record.gradients[0].sketches.values())))


def test_a_tensor_scaled_by_5_percent_fails_the_slope_alone() -> None:
    runs = base("mlp")
    candidate = with_gradients(
        runs.repeat,
        lambda name, value: value * (1.05 if name == "5.weight" else 1.0),
        step=1,
        point="before_clip",
    )

    assert fired(runs, candidate, Numerics.PRECISION) == {"slope"}


def test_a_tensor_without_true_gradient_may_be_any_rounding() -> None:
    runs = base("gpt")
    small = 1e-3 * norm_of(runs.record)
    candidate = with_gradients(
        runs.repeat,
        lambda name, value: np.full_like(value, small / 8) if name.endswith(".k.bias") else value,
        step=1,
        point="before_clip",
    )

    assert fired(runs, candidate, Numerics.ROUNDING) == set()


def test_a_tensor_without_true_gradient_may_not_grow() -> None:
    runs = base("gpt")
    large = 0.1 * norm_of(runs.record)
    candidate = with_gradients(
        runs.repeat,
        lambda name, value: np.full_like(value, large) if name.endswith(".k.bias") else value,
        step=1,
        point="before_clip",
    )

    check = runs.check(candidate, Numerics.PRECISION)

    assert check.worst["gradient"] > 1
    assert "has no true gradient" in check.why


@pytest.mark.parametrize("point", ["before_clip", "at_step"])
def test_the_second_step_is_judged_as_one_vector(point: str) -> None:
    runs = base("mlp")
    candidate = with_gradients(runs.repeat, lambda _, value: 2 * value, step=2, point=point)

    assert fired(runs, candidate, Numerics.PRECISION) == {"second_gradient"}


def test_any_difference_at_all_breaks_an_exact_promise() -> None:
    runs = base("mlp")
    candidate = with_gradients(
        runs.repeat, lambda _, value: value * (1 + 2**-50), step=1, point="at_step"
    )

    assert fired(runs, candidate, Numerics.EXACT) == {"clipped_gradient"}
    assert fired(runs, candidate, Numerics.ROUNDING) == set()


@pytest.mark.parametrize(
    ("promise", "step", "factor", "status"),
    [
        (Numerics.ROUNDING, 2, 1 + 5e-5, "within"),
        (Numerics.ROUNDING, 2, 1 + 5e-4, "rejected"),
        (Numerics.ROUNDING, 8, 1 + 5e-4, "within"),
        (Numerics.ROUNDING, 8, 1.01, "rejected"),
        (Numerics.PRECISION, 2, 1 + 5e-4, "within"),
        (Numerics.PRECISION, 8, 1.01, "rejected"),
    ],
)
def test_losses_have_a_band(promise: Numerics, step: int, factor: float, status: str) -> None:
    runs = base("mlp")
    losses = [*runs.repeat.losses]
    losses[step - 1] *= factor

    check = runs.check(replace(runs.repeat, losses=tuple(losses)), promise)

    assert check.status == status, check
    assert f"loss {step}" in check.why


def test_a_buffer_that_is_off_is_named() -> None:
    runs = base("conv")
    buffers = dict(runs.repeat.buffers)
    buffers["1.running_mean"] = 1.1 * buffers["1.running_mean"]

    check = runs.check(replace(runs.repeat, buffers=buffers), Numerics.PRECISION)

    assert check.why.startswith("buffers: buffer 1.running_mean differs by 0.1")


def with_samples(record: GuardRecord, *marks: tuple[int, str]) -> GuardRecord:
    return replace(record, samples={LOADER: {"[0]": marks}})


def with_equal_samples(runs: Base, *marks: tuple[int, str]) -> Base:
    """Return the runs with other digests in all of them."""
    other = object.__new__(Base)
    other.__dict__.update(runs.__dict__)
    for name in ("record", "repeat", "calibration"):
        setattr(other, name, with_samples(getattr(runs, name), *marks))
    return other


DIGESTS = tuple((4 * n, f"digest {n}") for n in range(1, 21))


@pytest.mark.parametrize(
    ("marks", "status"),
    [
        pytest.param(DIGESTS, "same", id="equal"),
        pytest.param((*DIGESTS, (84, "ahead")), "same", id="one batch drawn ahead"),
        pytest.param(
            tuple((2 * n, DIGESTS[n // 2 - 1][1] if n % 2 == 0 else "half") for n in range(1, 41)),
            "same",
            id="micro-batches",
        ),
        pytest.param(
            (*DIGESTS[:5], (24, "other"), *DIGESTS[6:]), "rejected", id="one batch differs"
        ),
        pytest.param(tuple((3 * n, "x") for n in range(1, 27)), "rejected", id="other batch size"),
        pytest.param(DIGESTS[:4], "rejected", id="a fifth of the batches"),
    ],
)
def test_samples_are_compared_at_equal_numbers_of_rows(
    marks: tuple[tuple[int, str], ...], status: str
) -> None:
    runs = with_equal_samples(base("mlp"), *DIGESTS)

    check = runs.check(with_samples(runs.repeat, *marks), Numerics.EXACT)

    assert check.status == status, check


def test_parameters_in_other_groups_are_rejected() -> None:
    runs = base("mlp")
    optimizer = runs.repeat.optimizers[0]
    names = optimizer.groups[0]
    split = replace(optimizer, groups=(names[:2], names[2:]))

    check = runs.check(replace(runs.repeat, optimizers=(split,)), Numerics.PRECISION)

    assert check.why == "tensors: optimizer 0 has its parameters in other groups"


def test_no_calibration_lifts_a_precision_limit_above_its_ceiling():
    column = COLUMNS[Numerics.PRECISION]

    assert column.gradient.of(0.42, noise=0.0) == GRADIENT_CEILING
    assert column.gradient.of(0.08, noise=0.0) == pytest.approx(0.24)


def nudged(record: GuardRecord, share: float, *, seed: int = 0) -> GuardRecord:
    """Change every gradient of the first step by rounding of this size."""
    random = np.random.default_rng(seed)

    def change(_name: str, value: np.ndarray) -> np.ndarray:
        return value * (1 + share * random.standard_normal(value.shape))

    changed = with_gradients(record, change, step=1, point="before_clip")
    return with_gradients(changed, change, step=1, point="at_step")


def test_where_the_device_rounds_to_tf32_another_algorithm_may_be_as_far_off_as_that() -> None:
    runs = base("mlp")
    as_tf32, as_bf16 = nudged(runs.repeat, 4e-4), nudged(runs.repeat, 6e-2)
    on_fp32 = fired(runs, as_tf32, Numerics.ROUNDING)

    def on_tf32(candidate: GuardRecord) -> LossCheck:
        return runs.check(candidate, Numerics.ROUNDING, baseline=replace(runs.record, tf32=True))

    assert on_fp32 & {"gradient", "clipped_gradient"}
    assert on_tf32(as_tf32).passed
    assert "TF32" in on_tf32(as_tf32).why
    assert on_tf32(as_bf16).status == "rejected"


def test_no_tensor_is_taken_to_repeat_better_than_half_of_them_do() -> None:
    runs = base("mlp")
    lucky = "0.bias"

    def noisy(seed: int, share: float = 1e-6) -> GuardRecord:
        record = nudged(runs.repeat, share, seed=seed)
        if seed:
            return record
        original = {s.point: s.sketches[lucky] for s in runs.repeat.gradients if s.step == 1}
        sets = (
            replace(s, sketches={**s.sketches, lucky: original[s.point]}) if s.step == 1 else s
            for s in record.gradients
        )
        return replace(record, gradients=tuple(sets))

    def check(candidate: GuardRecord) -> LossCheck:
        return runs.check(candidate, Numerics.EXACT, calibration=None, repeat=noisy(0))

    assert check(noisy(1)).passed
    assert check(noisy(1, 1e-4)).status == "rejected"
