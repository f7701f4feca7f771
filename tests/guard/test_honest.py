from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.agent.guard.pinning import drop_dropout, keep_random_compile
from flatout.guard.judge import aa
from flatout.records.technique import Numerics
from tests.guard import loop
from tests.guard.faults import ACCUMULATED, SCALED
from tests.guard.loop import CASES, Batch, Case, Setting
from tests.guard.runs import Base, base

ALL = list(CASES)
FUSED = (("fused", True),)
FOREACH = (("foreach", True),)
BF16 = Setting(autocast=True)


def compiles(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test that compiles: slow when cold, and torch's compiler warns of itself on import."""
    return pytest.mark.slow(pytest.mark.filterwarnings("ignore::DeprecationWarning")(test))


@pytest.mark.parametrize("case", ALL)
def test_a_script_that_repeats_is_the_same_as_itself(case: str) -> None:
    runs = base(case)

    check = aa(runs.record, runs.repeat)

    assert check.status == "same"
    assert check.steps == 20


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(Setting(), id="nothing"),
        pytest.param(Setting(optimizer=FOREACH), id="foreach"),
        pytest.param(Setting(scaled=True), id="gradient scaler"),
    ],
)
def test_an_exact_change_is_the_same_bit_for_bit(case: str, setting: Setting) -> None:
    runs = base(case)

    check = runs.check(runs.run(setting), Numerics.EXACT)

    assert check.status == "same", check


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize("baseline", [Setting(), SCALED, ACCUMULATED], ids=["", "scaled", "accum"])
def test_a_fused_optimizer_stays_within_rounding(case: str, baseline: Setting) -> None:
    runs = base(case, baseline)

    check = runs.check(runs.run(replace(baseline, optimizer=FUSED)), Numerics.ROUNDING)

    assert check.passed, check
    assert check.worst["update"] < 0.01


@pytest.mark.parametrize("case", ALL)
def test_another_number_of_threads_stays_within_rounding(case: str) -> None:
    runs = base(case)
    candidate = runs.run(Setting(threads=2, steps=5))

    check = runs.check(candidate, Numerics.ROUNDING, changes_threads=True)

    assert check.passed, check


@pytest.mark.parametrize("case", ["mlp", "gpt", "lstm"])
def test_micro_batches_of_the_same_samples_stay_within_rounding(case: str) -> None:
    runs = base(case)

    check = runs.check(runs.run(ACCUMULATED), Numerics.ROUNDING)

    assert check.status == "within", check


def test_channels_last_stays_within_rounding() -> None:
    runs = base("conv")

    check = runs.check(runs.run(Setting(channels_last=True)), Numerics.ROUNDING)

    assert check.status == "within", check


@pytest.mark.parametrize("case", ALL)
@pytest.mark.parametrize(
    "setting",
    [pytest.param(BF16, id="alone"), pytest.param(replace(BF16, optimizer=FUSED), id="fused")],
)
def test_bf16_autocast_stays_within_precision(case: str, setting: Setting) -> None:
    runs = base(case)

    check = runs.check(runs.run(setting), Numerics.PRECISION)

    assert check.status == "within", check


def test_bf16_autocast_with_channels_last_stays_within_precision() -> None:
    runs = base("conv")

    check = runs.check(runs.run(replace(BF16, channels_last=True)), Numerics.PRECISION)

    assert check.status == "within", check


@pytest.mark.parametrize("case", ALL)
def test_bf16_autocast_is_more_than_rounding(case: str) -> None:
    runs = base(case)

    check = runs.check(runs.run(BF16), Numerics.ROUNDING)

    assert check.status == "rejected"


@pytest.mark.parametrize("case", ALL)
def test_rounding_is_judged_by_the_precision_limits_where_the_script_is_in_bf16(case: str) -> None:
    runs = base(case, BF16)

    check = runs.check(runs.run(replace(BF16, optimizer=FUSED)), Numerics.ROUNDING)

    assert check.passed, check
    assert "bf16 autocast has nothing to do" in check.why


@compiles
def test_a_compiled_model_stays_within_rounding() -> None:
    runs = base("mlp")

    check = runs.check(runs.run(Setting(compile=True)), Numerics.ROUNDING)

    assert check.passed, check
    assert graphs_compiled() == 1


@pytest.mark.parametrize("case", ["mlp", "gpt", "lstm"])
def test_a_script_in_bf16_gets_its_scale_from_full_precision(case: str) -> None:
    runs = Base(CASES[case], BF16)
    runs.calibrate_in_fp32()

    honest = runs.check(runs.run(replace(BF16, accumulate=2)), Numerics.ROUNDING)
    faulty = runs.check(runs.run(replace(BF16, accumulate=2, divide=False)), Numerics.ROUNDING)

    assert honest.status == "within", honest
    assert faulty.status == "rejected", faulty


def graphs_compiled() -> int:
    """Return how many graphs the compiler made of the last model."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def dropping_mlp() -> nn.Module:
    return loop.Net(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 10))


DROPPING = Case(model=dropping_mlp, batch=loop.vectors, loss=F.cross_entropy)


@compiles
def test_a_compiled_dropout_that_draws_other_masks_is_rejected() -> None:
    runs = Base(DROPPING, Setting())

    check = runs.check(runs.run(Setting(compile=True)), Numerics.PRECISION)

    assert check.status == "rejected"
    assert graphs_compiled() == 1


@compiles
def test_a_compiled_dropout_matches_when_it_draws_as_eager_does() -> None:
    runs = Base(DROPPING, Setting())
    undo = keep_random_compile()
    try:
        check = runs.check(runs.run(Setting(compile=True)), Numerics.ROUNDING)
    finally:
        undo()

    assert check.passed, check
    assert graphs_compiled() == 1


@compiles
def test_a_compiled_dropout_matches_when_dropout_is_switched_off() -> None:
    undo = drop_dropout()
    try:
        runs = Base(DROPPING, Setting())
        check = runs.check(runs.run(Setting(compile=True)), Numerics.ROUNDING)
    finally:
        undo()

    assert check.passed, check
    assert graphs_compiled() == 1


class Gate(nn.Module):
    """A convolution and pointwise operations that one torch build compiled to wrong gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv(x)
        return torch.sigmoid(torch.where(conv > 0, conv, F.max_pool2d(conv, 3, 1, 1)))


def gate_batch(step: int) -> Batch:
    x = torch.randn(8, 3, 9, 10, generator=loop.generator(step))
    return x, torch.rand(8, 8, 9, 10, generator=loop.generator(step + 500))


GATE = Case(model=Gate, batch=gate_batch, loss=F.mse_loss)


def gradient_error_of_compile(case: Case) -> float:
    """Return how far compiled gradients are from those in double precision, without the guard."""
    torch.manual_seed(0)
    model = case.model()
    x, y = case.batch(0)
    case.loss(model.double()(x.double()), y.double()).backward()
    true = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    compiled = torch.compile(model.float())
    case.loss(compiled(x), y).backward()
    found = [p.grad.double() for p in model.parameters()]
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, true, strict=True))


@compiles
def test_the_verdict_on_a_compiled_gate_is_the_truth_about_its_gradients() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        is_wrong = gradient_error_of_compile(GATE) > 0.05
    finally:
        torch.set_num_threads(threads)
    runs = Base(GATE, Setting(threads=2))
    candidate = runs.run(Setting(threads=2, compile=True))

    strict = runs.check(candidate, Numerics.ROUNDING)
    wide = runs.check(candidate, Numerics.PRECISION)

    assert (strict.status == "rejected") is is_wrong, strict
    assert (wide.status == "rejected") is is_wrong, wide
    assert not is_wrong or wide.why.startswith("gradient: gradient before clipping of conv.")
