import copy

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from flatout.records.errors import NotApplicable
from flatout.techniques.optimizer.adafactor import Adafactor
from flatout.techniques.optimizer.fused_optimizer import FusedOptimizer, fuse
from tests.techniques.facts import machine, optimizer, profile
from tests.techniques.small_training import network, stepped, train

PROMISE = ("naive_gpt.py", {})

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_before_up_to_rounding(kind):
    plain = network()
    fused = copy.deepcopy(plain)
    changed = FusedOptimizer().optimizer(KINDS[kind](fused.parameters()))

    expected = train(plain, KINDS[kind](plain.parameters()))
    found = train(fused, changed)

    assert all(group["fused"] for group in changed.param_groups)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_applied_in_the_first_step_with_a_gradient_scaler_it_unscales_once():
    plain = network()
    fused = copy.deepcopy(plain)

    def train_scaled(module, hook):
        stepper = KINDS["AdamW"](module.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        handle = stepper.register_step_pre_hook(hook)
        for step in range(4):
            stepper.zero_grad()
            loss = module(torch.ones(4, 8)).square().mean()
            scaler.scale(loss * (float("inf") if step == 2 else 1.0)).backward()
            scaler.step(stepper)
            scaler.update()
            handle.remove()
        return [*module.parameters(), torch.tensor(scaler.get_scale())]

    def fuse_first(stepper, _args, _kwargs):
        FusedOptimizer().optimizer(stepper)

    expected = train_scaled(plain, lambda *_: None)
    found = train_scaled(fused, fuse_first)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


class Parts(nn.Module):
    """Has two layers of which a step may leave out one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.late = nn.Linear(8, 8), nn.Linear(8, 8)

    def loss(self, step, parts):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        return sum(getattr(self, name)(x).square().mean() for name in parts)


BOTH = ("first", "late")
LATE = (("first",), BOTH, BOTH, ("late",), BOTH)
"""The layers of each step."""


def train_parts(module, stepper, steps=LATE):
    for number, parts in enumerate(steps):
        stepper.zero_grad()
        module.loss(number, parts).backward()
        stepper.step()
    return list(module.parameters())


def sgd(parameters, **options):
    return torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, **options
    )


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_whose_first_gradient_comes_late_train_as_before(kind):
    plain, fused = Parts(), Parts()

    found = train_parts(fused, FusedOptimizer().optimizer(KINDS[kind](fused.parameters())))

    expected = train_parts(plain, KINDS[kind](plain.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_a_late_first_momentum_is_that_of_torchs_own_fused_step_bit_for_bit():
    apart, together = Parts(), Parts()
    # In a group of its own torch makes the late layer's buffers itself.
    groups = [{"params": getattr(apart, name).parameters()} for name in BOTH]

    found = train_parts(together, fuse(sgd(together.parameters())), LATE[:3])

    expected = train_parts(apart, sgd(groups, fused=True), LATE[:3])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_closure_may_bring_the_late_gradients():
    plain, fused = Parts(), Parts()

    def train_closed(module, stepper):
        for number, parts in enumerate(LATE):

            def closure(number=number, parts=parts):
                stepper.zero_grad()
                loss = module.loss(number, parts)
                loss.backward()
                return loss

            stepper.step(closure)
        return list(module.parameters())

    found = train_closed(fused, fuse(sgd(fused.parameters())))

    expected = train_closed(plain, sgd(plain.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_what_is_saved_before_all_have_momentum_goes_on_without_flatout():
    plain, fused = Parts(), Parts()
    reference, stepper = sgd(plain.parameters()), fuse(sgd(fused.parameters()))
    train_parts(plain, reference, LATE[:1])
    train_parts(fused, stepper, LATE[:1])
    resumed = sgd(fused.parameters())

    resumed.load_state_dict(copy.deepcopy(stepper.state_dict()))

    assert stepper.param_groups[0]["fused"]
    assert not resumed.param_groups[0]["fused"]
    found, expected = train_parts(fused, resumed), train_parts(plain, reference)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_fused_steps_that_are_loaded_go_on_and_are_no_choice_of_the_script():
    module = Parts()
    stepper = fuse(torch.optim.AdamW(module.parameters()))
    train_parts(module, stepper)
    resumed = torch.optim.AdamW(module.parameters())

    resumed.load_state_dict(stepper.state_dict())

    assert resumed.param_groups[0]["fused"]
    with pytest.raises(NotApplicable, match="goes on with them on its own"):
        FusedOptimizer().optimizer(resumed)


def test_what_is_saved_when_all_have_momentum_goes_on_fused():
    module = Parts()
    stepper = fuse(sgd(module.parameters()))

    train_parts(module, stepper)

    assert [group["fused"] for group in stepper.state_dict()["param_groups"]] == [True]


def train_scaled(module, stepper, bad=(0, 2), load=None):
    """Train with a scaler; some losses overflow, and a checkpoint may come in between."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(5):
        if number == 3 and load is not None:
            stepper.load_state_dict(load)
        stepper.zero_grad()
        loss = module.loss(number, LATE[number])
        scaler.scale(loss * (float("inf") if number in bad else 1.0)).backward()
        scaler.step(stepper)
        scaler.update()
    return [*module.parameters(), torch.tensor(scaler.get_scale())]


@pytest.mark.parametrize("kind", KINDS)
def test_first_gradients_that_overflow_leave_no_momentum(kind):
    plain, fused = Parts(), Parts()

    found = train_scaled(fused, fuse(KINDS[kind](fused.parameters())))

    expected = train_scaled(plain, KINDS[kind](plain.parameters()))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_plain_checkpoint_that_is_loaded_later_is_fused_and_unscaled_too(kind):
    earlier, plain, fused = Parts(), Parts(), Parts()
    before = KINDS[kind](earlier.parameters())
    train_parts(earlier, before)
    saved = before.state_dict()
    stepper = fuse(KINDS[kind](fused.parameters()))

    found = train_scaled(fused, stepper, load=copy.deepcopy(saved))

    expected = train_scaled(plain, KINDS[kind](plain.parameters()), load=copy.deepcopy(saved))
    assert [group["fused"] for group in stepper.param_groups] == [True]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)


def test_an_optimizer_whose_place_another_takes_is_not_fused(request):
    module = Parts()
    stepper = torch.optim.AdamW(module.parameters())
    refused = []

    def both(optimizer, _args, _kwargs):
        if refused:
            return
        Adafactor().optimizer(optimizer)
        with pytest.raises(NotApplicable, match="another optimizer in its place") as reason:
            FusedOptimizer().optimizer(optimizer)
        refused.append(reason)

    # As the hook points do: its class changes at the end of this step.
    request.addfinalizer(register_optimizer_step_pre_hook(both).remove)
    found = train_scaled(module, stepper)

    assert (len(refused), type(stepper)) == (1, torch.optim.Adafactor)
    assert all(p.isfinite().all() for p in found)


def test_parameters_that_join_later_are_fused_too():
    module = network()
    stepper = fuse(torch.optim.AdamW(module[0].parameters()))

    stepper.add_param_group({"params": module[2].parameters()})

    assert [group["fused"] for group in stepper.param_groups] == [True, True]


def _differentiable():
    return torch.optim.AdamW(network().parameters(), differentiable=True)


def _sparse():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return torch.optim.SGD(embedding.parameters(), lr=0.1)


def _laid_out_otherwise():
    convolution = nn.Conv2d(3, 4, 3)
    images = torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last)
    weights = list(convolution.parameters())
    gradients = torch.autograd.grad(convolution(images).sum(), weights)
    for weight, gradient in zip(weights, gradients, strict=True):
        weight.grad = gradient
    return torch.optim.AdamW(weights)


def _damped():
    return torch.optim.SGD(network().parameters(), lr=0.1, momentum=0.9, dampening=0.5)


def _complex():
    return torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: torch.optim.RMSprop(network().parameters()), "no fused implementation"),
        (lambda: torch.optim.AdamW(network().parameters(), fused=True), "chose"),
        (lambda: torch.optim.AdamW(network().parameters(), foreach=True), "chose"),
        (lambda: OwnStep(network().parameters()), "a step of its own"),
        (_differentiable, "differentiable"),
        (stepped, "made a step"),
        (_sparse, "sparse"),
        (_laid_out_otherwise, "stored otherwise"),
        (_complex, "not floating-point"),
        (_damped, "dampening"),
        (lambda: torch.optim.AdamW([nn.Parameter(torch.ones(2, device="meta"))]), "device"),
    ],
)
def test_an_optimizer_that_cannot_be_fused_is_left_as_it_is(build, reason):
    stepper = build()
    before = copy.deepcopy(
        [{k: v for k, v in g.items() if k != "params"} for g in stepper.param_groups]
    )

    with pytest.raises(NotApplicable, match=reason):
        FusedOptimizer().optimizer(stepper)
    with pytest.raises(ValueError, match=f"cannot be fused: .*{reason}"):
        fuse(stepper)

    after = [{k: v for k, v in g.items() if k != "params"} for g in stepper.param_groups]
    assert after == before


@pytest.mark.parametrize("switched_off", [{"fused": False}, {"foreach": None}, {"foreach": False}])
def test_what_a_script_switches_off_is_no_choice_against_it(switched_off):
    stepper = torch.optim.AdamW(network().parameters(), **switched_off)

    FusedOptimizer().optimizer(stepper)

    assert [(g["fused"], g["foreach"]) for g in stepper.param_groups] == [(True, None)]


def test_only_the_optimizers_share_can_be_gained():
    facts = profile(phases_ms={"optimizer": 100.0}, optimizers=(optimizer(),))

    (found,) = FusedOptimizer.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-60.0)


@pytest.mark.parametrize(
    ("facts", "optimizer_ms"),
    [
        (optimizer(), 0.0),
        (optimizer(is_fused=True), 100.0),
        (optimizer(has_fused_option=False), 100.0),
    ],
)
def test_it_is_not_offered_where_it_cannot_matter(facts, optimizer_ms):
    known = profile(phases_ms={"optimizer": optimizer_ms}, optimizers=(facts,))

    assert FusedOptimizer.candidates(known, machine()) == ()
