"""Scaled losses: the script sees plain gradients, and no update is made of infinities."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from flatout.agent import optimizer_swap
from flatout.records.errors import NotApplicable
from flatout.techniques.precision.fp16_autocast import Fp16Autocast, autocast_fp16, loss_scaling
from flatout.techniques.precision.fp16_autocast.loss_scaling import (
    MAX_WALKS,
    LossScaling,
    leaves_of,
)
from tests.techniques.facts import CPU, gpu, machine, model, profile
from tests.techniques.guarded import played
from tests.techniques.small_training import network

PROMISE = ("elaborate", {})


def loss_of(model, seed=1):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def scaled_backward(scaling):
    return scaling.around(torch.autograd.backward)


def test_gradients_are_those_of_the_unscaled_loss():
    plain, scaled = network(), network()

    torch.autograd.backward(loss_of(plain))
    scaled_backward(LossScaling())(loss_of(scaled))

    pairs = zip(plain.parameters(), scaled.parameters(), strict=True)
    assert all(torch.equal(p.grad, q.grad) for p, q in pairs)


def test_accumulated_gradients_are_added_up_unscaled():
    plain, scaled = network(), network()
    backward = scaled_backward(LossScaling())

    for seed in (1, 2, 3):
        torch.autograd.backward(loss_of(plain, seed))
        backward(loss_of(scaled, seed))

    pairs = zip(plain.parameters(), scaled.parameters(), strict=True)
    assert all(torch.allclose(p.grad, q.grad, rtol=1e-6) for p, q in pairs)


def test_gradients_that_fp16_would_lose_are_kept():
    value = torch.full((4,), 0.5, requires_grad=True)

    def gradient(backward):
        value.grad = None
        backward((value.half().float() * 2.0**-26).sum())
        return value.grad.tolist()

    assert gradient(torch.autograd.backward) == [0.0] * 4
    assert gradient(scaled_backward(LossScaling())) == [2.0**-26] * 4


def test_a_parameter_outside_the_model_is_unscaled_too():
    temperature = torch.ones((), requires_grad=True)
    inner = network()

    scaled_backward(LossScaling())(loss_of(inner) * temperature)

    expected = loss_of(inner).detach()
    assert torch.allclose(temperature.grad, expected)


def test_the_leaves_of_a_graph_are_found():
    inner = network()

    found = {id(leaf) for leaf in leaves_of([loss_of(inner)])}

    assert found == {id(p) for p in inner.parameters()}


@pytest.fixture
def scaling(monkeypatch):
    """Return a scaling whose hooks are gone after the test."""
    made = LossScaling()
    handles = [
        register_optimizer_step_pre_hook(made._before_step),
        register_optimizer_step_post_hook(made._after_step),
    ]
    kind = torch.optim.lr_scheduler.LRScheduler
    monkeypatch.setattr(kind, "step", made._holding(kind.step))
    yield made
    for handle in handles:
        handle.remove()


def test_a_step_that_overflowed_changes_nothing_and_halves_the_scale(scaling):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    scale = scaling.scale

    scaled_backward(scaling)(loss_of(model) * float("inf"))
    optimizer.step()

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert (scaling.scale, scaling.skipped) == (scale / 2, 1)
    assert not optimizer.state


def test_where_no_scale_helps_the_training_goes_on_in_fp32_and_says_so(scaling):
    model, technique = network(), Fp16Autocast()
    technique.scalings.append(scaling)
    optimizer, backward = torch.optim.SGD(model.parameters(), lr=0.1), scaled_backward(scaling)
    seen = []
    model[0].register_forward_hook(lambda _m, _args, out: seen.append(out.dtype))
    call = technique.forward(model, model)
    lost = 14  # from 8192 down to 1, and that one

    for number in range(lost + 1):
        optimizer.zero_grad()
        loss = call(torch.ones(2, 8)).square().mean()
        backward(loss * (float("inf") if number < lost else 1.0))
        before = model[0].weight.clone()
        optimizer.step()

    assert seen == [torch.float16] * lost + [torch.float32]
    assert not torch.equal(model[0].weight, before)
    with pytest.raises(NotApplicable, match=f"given up after {lost} steps"):
        technique.end()


def test_after_a_step_that_overflowed_gradients_are_there_and_zero(scaling):
    """A script may clear them with `p.grad.zero_()`, or log their norm."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    scaled_backward(scaling)(loss_of(model) * float("inf"))
    optimizer.step()

    assert [p.grad.norm().item() for p in model.parameters()] == [0.0] * 4


def test_one_overflow_among_accumulated_losses_skips_the_step(scaling):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    backward = scaled_backward(scaling)

    backward(loss_of(model) * float("inf"))
    backward(loss_of(model))
    optimizer.step()
    skipped = {name: torch.equal(before[name], p) for name, p in model.state_dict().items()}
    optimizer.zero_grad()
    backward(loss_of(model))
    optimizer.step()

    assert all(skipped.values())
    assert not torch.equal(before["0.weight"], model[0].weight)
    assert scaling.skipped == 1


def test_a_closure_that_overflows_changes_nothing(scaling):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model) * float("inf")
        scaled_backward(scaling)(loss)
        return loss

    optimizer.step(closure)

    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_skipped_step_does_not_advance_the_schedule(scaling):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    backward = scaled_backward(scaling)

    rates = []
    for factor in (1.0, float("inf"), 1.0):
        optimizer.zero_grad()
        backward(loss_of(model) * factor)
        optimizer.step()
        schedule.step()
        rates.append(optimizer.param_groups[0]["lr"])

    assert rates == [0.5, 0.5, 0.25]


def test_a_schedule_by_epochs_goes_on_after_a_skipped_step(scaling):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    backward = scaled_backward(scaling)

    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        backward(loss_of(model) * factor)
        optimizer.step()
    schedule.step()

    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_parameter_at_the_address_of_one_that_is_gone_is_unscaled_in_its_step(scaling):
    model, gone = network(), torch.ones(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaling._walks = MAX_WALKS
    scaling._leaves = {id(p): weakref.ref(gone) for p in model.parameters()}
    del gone
    expected = copy.deepcopy(model)
    torch.autograd.backward(loss_of(expected))

    scaled_backward(scaling)(loss_of(model))
    optimizer.step()

    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_later_models_first_gradients_are_unscaled_before_its_first_step(scaling, monkeypatch):
    live = []
    monkeypatch.setattr(loss_scaling, "live_optimizers", lambda: live)
    backward = scaled_backward(scaling)
    for _ in range(MAX_WALKS):
        backward(loss_of(network()))
    later, plain = network(), network()
    torch.autograd.backward(loss_of(plain))

    live.append(torch.optim.SGD(later.parameters(), lr=0.1))
    backward(loss_of(later))

    pairs = zip(later.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_a_model_whose_first_backward_comes_late_is_known_by_its_call(monkeypatch):
    """A generator that is trained every few steps of the critic, its gradients clipped."""
    monkeypatch.setattr(optimizer_swap, "_OF_ALL", [])
    monkeypatch.setattr(LossScaling, "install", lambda self, backward, _: self.around(backward))
    technique, critic, generator, plain = Fp16Autocast(), network(), network(), network()
    technique.forward(critic, critic)
    backward = technique.backward(torch.autograd.backward)
    for _ in range(MAX_WALKS):
        backward(loss_of(critic))

    technique.forward(generator, generator)
    backward(loss_of(generator))

    torch.autograd.backward(loss_of(plain))
    pairs = zip(generator.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one.grad, other.grad) for one, other in pairs)


def test_gradients_from_before_their_model_was_met_are_not_scaled_twice(scaling):
    model, plain = network(), network()
    backward = scaled_backward(scaling)
    scaling._walks = MAX_WALKS
    backward(loss_of(model, 1))

    scaling._walks = 0
    backward(loss_of(model, 2))

    for seed in (1, 2):
        torch.autograd.backward(loss_of(plain, seed))
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.allclose(one.grad, other.grad) for one, other in pairs)


def test_sparse_gradients_are_unscaled_too():
    table = nn.Embedding(10, 4, sparse=True)

    scaled_backward(LossScaling())(table(torch.tensor([1, 1, 3])).sum())

    assert table.weight.grad.to_dense()[1].tolist() == [2.0] * 4


def test_products_are_computed_in_fp16_and_given_back_in_fp32():
    seen = []
    linear = nn.Linear(8, 4)
    linear.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))

    output = autocast_fp16(linear, "cpu")(torch.randn(2, 8))

    assert (seen, output.dtype) == ([torch.float16], torch.float32)


def test_a_script_that_changes_gradients_by_hooks_is_left_alone():
    module = network()
    next(module.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))

    with pytest.raises(NotApplicable, match="hooks on gradients"):
        Fp16Autocast().forward(module, module)


def test_a_model_of_another_precision_is_left_alone():
    technique = Fp16Autocast()
    lowered = nn.Linear(2, 2).bfloat16()

    with pytest.raises(NotApplicable, match="bfloat16"):
        technique.forward(lowered, lowered)
    with pytest.raises(NotApplicable, match="no model was put under fp16"):
        technique.backward(torch.autograd.backward)


@pytest.mark.parametrize(
    ("kind", "capability", "count"),
    [("cuda", (7, 5), 1), ("cuda", (8, 0), 0), ("cuda", (6, 1), 0), ("cpu", None, 0)],
)
def test_it_is_offered_where_fp16_is_fast_and_bf16_is_not(kind, capability, count):
    facts = profile(kind=kind, models=(model(),))

    found = Fp16Autocast.candidates(facts, machine(device=gpu(capability)))

    assert len(found) == count


@pytest.mark.parametrize(
    ("kind", "device", "features", "step_ms", "why"),
    [
        ("cpu", CPU, {"avx2", "avx512_bf16"}, 1600.0, "no units for fp16"),
        ("cpu", CPU, {"avx512_fp16"}, -50.0, "2.0 times faster"),
        ("cpu", CPU, {"amx_fp16"}, -50.0, "2.0 times faster"),
        ("cpu", CPU, {"asimdhp"}, -50.0, "2.0 times faster"),
        ("cuda", gpu((7, 5)), {}, -50.0, "2.0 times faster"),
        ("cuda", gpu((6, 1)), {}, 0.0, "no units for fp16"),
    ],
)
def test_a_gain_is_predicted_only_where_the_device_multiplies_fp16(
    kind, device, features, step_ms, why
):
    host = machine(device=device, cpu_features=frozenset(features))

    effect = Fp16Autocast().predict(profile(kind=kind, models=(model(),)), host)

    assert effect.step_ms == pytest.approx(step_ms)
    assert why in effect.why


@pytest.mark.slow
def test_it_is_applied_to_a_real_script():
    trial = played("naive_gpt.py --clip 0.5 --schedule", "fp16_autocast", steps=12)

    assert trial.outcome.value == "ok", trial.message
    assert [(item.technique, item.status) for item in trial.applied] == [
        ("fp16_autocast", "applied")
    ]
    first, *others = trial.profile.losses
    assert sum(others) / len(others) < first
