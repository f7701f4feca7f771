import copy

import pytest
import torch
from torch import nn

from flatout.core.errors import NotApplicable
from flatout.techniques.optimizer.fused_optimizer import FusedOptimizer, fuse
from tests.techniques.facts import machine, optimizer, profile

PROMISE = ("naive_gpt.py", {})

KINDS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
}


class OwnStep(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))


def train(module, stepper, steps=5):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        stepper.zero_grad()
        module(x).square().mean().backward()
        stepper.step()
    return list(module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_before_up_to_rounding(kind):
    plain = network()
    fused = copy.deepcopy(plain)
    changed = FusedOptimizer().optimizer(KINDS[kind](fused.parameters()))

    expected = train(plain, KINDS[kind](plain.parameters()))
    found = train(fused, changed)

    assert all(group["fused"] for group in changed.param_groups)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


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

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_parameters_that_join_later_are_fused_too():
    module = network()
    stepper = fuse(torch.optim.AdamW(module[0].parameters()))

    stepper.add_param_group({"params": module[2].parameters()})

    assert [group["fused"] for group in stepper.param_groups] == [True, True]


def _differentiable():
    return torch.optim.AdamW(network().parameters(), differentiable=True)


def _stepped():
    module = network()
    stepper = torch.optim.AdamW(module.parameters())
    train(module, stepper, steps=1)
    return stepper


def _sparse():
    embedding = nn.Embedding(10, 4, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    return torch.optim.SGD(embedding.parameters(), lr=0.1)


def _complex():
    return torch.optim.AdamW([nn.Parameter(torch.ones(2, dtype=torch.complex64))])


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: torch.optim.RMSprop(network().parameters()), "no fused implementation"),
        (lambda: torch.optim.AdamW(network().parameters(), fused=True), "chose"),
        (lambda: torch.optim.AdamW(network().parameters(), fused=False), "chose"),
        (lambda: torch.optim.AdamW(network().parameters(), foreach=True), "chose"),
        (lambda: OwnStep(network().parameters()), "a step of its own"),
        (_differentiable, "differentiable"),
        (_stepped, "made a step"),
        (_sparse, "sparse"),
        (_complex, "not floating-point"),
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
