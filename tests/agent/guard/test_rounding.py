import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.agent.guard.pinning import round_once
from flatout.guard.limits import GRADIENT_CEILING
from flatout.records.technique import Numerics
from tests.guard.loop import Case, FakeSession, Setting
from tests.guard.runs import Base

OFFSET = 300.0
"""Numbers of bf16 lie two apart here: what is left of a sum once it is taken off is noise."""
PLAIN = Setting(clip=0.0)  # it would hide that the gradients explode
BF16 = replace(PLAIN, autocast=True)


class Amplifier(nn.Module):
    """Many layers with BatchNorm: untrained, they amplify every rounding."""

    def __init__(self, layers=8, width=64):
        super().__init__()
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, width, bias=False), nn.BatchNorm1d(width), nn.ReLU())
                for _ in range(layers)
            )
        )
        self.head = nn.Linear(width, 8)

    def forward(self, x):
        return self.head(self.body(x))


class Loser(nn.Module):
    """A large number is added in one layer and taken off after it."""

    def __init__(self, width=64):
        super().__init__()
        self.far, self.head = nn.Linear(width, width), nn.Linear(width, 8)
        nn.init.constant_(self.far.bias, OFFSET)

    def forward(self, x):
        return self.head(torch.relu(self.far(x) - OFFSET))


def batch(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(64, 64, generator=draw), torch.randint(8, (64,), generator=draw)


def case(model):
    return Case(model=model, batch=batch, loss=F.cross_entropy)


@functools.cache
def runs(model):
    return Base(case(model), PLAIN)


def judged(base, candidate, *, with_rounding):
    rounded = base.run(replace(PLAIN, rounds=True)) if with_rounding else None
    return base.check(candidate, Numerics.PRECISION, rounded=rounded)


def test_bf16_passes_where_one_rounding_explains_how_far_it_is_off():
    base = runs(Amplifier)
    candidate = base.run(BF16)

    without = judged(base, candidate, with_rounding=False)
    check = judged(base, candidate, with_rounding=True)

    assert without.status == "rejected"
    assert f"limit {GRADIENT_CEILING}" in without.why
    assert check.status == "within", check.why
    assert "one rounding of its inputs and weights moves this script's gradients" in check.why


def test_bf16_is_rejected_where_the_script_loses_its_digits():
    base = runs(Loser)
    candidate = base.run(BF16)

    for with_rounding in (False, True):
        check = judged(base, candidate, with_rounding=with_rounding)
        assert check.status == "rejected", check.why


def scale_a_weight(model):
    model.head.weight.grad *= 1.5


def forget_half(_step, made):
    x, y = made
    return torch.cat([x[:32], x[:32]]), torch.cat([y[:32], y[:32]])


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param({"after_backward": scale_a_weight}, id="a tensor scaled"),
        pytest.param({"zero_grad": False}, id="zero_grad forgotten"),
        pytest.param({"feed": forget_half}, id="half of the batch twice"),
        pytest.param({"optimizer": (("weight_decay", 0.0),)}, id="no weight decay"),
    ],
)
def test_faults_are_rejected_under_the_lifted_ceilings_too(fault):
    base = runs(Amplifier)

    check = judged(base, base.run(replace(BF16, **fault)), with_rounding=True)

    assert check.status == "rejected", check.why


def test_parameters_are_rounded_once_and_arguments_at_every_call():
    session, model = FakeSession(), nn.Linear(3, 2)
    round_once(session)
    x = torch.randn(4, 3)
    numbers, computed = torch.arange(5), torch.randn(3, requires_grad=True)
    before = computed.detach().clone()

    session.fire("forward", model, (x, numbers), {"other": computed})

    for tensor in (x, model.weight, model.bias):
        assert torch.equal(tensor, tensor.bfloat16().float())
    assert torch.equal(computed, before)
    assert numbers.tolist() == list(range(5))
    with torch.no_grad():
        model.weight += 1e-5
    moved, again = model.weight.detach().clone(), torch.randn(4, 3)
    session.fire("forward", model, (again,), {})
    assert torch.equal(model.weight, moved)
    assert torch.equal(again, again.bfloat16().float())


def test_what_autograd_keeps_of_an_argument_stays_usable():
    session, model = FakeSession(), nn.Linear(3, 2)
    round_once(session)
    x = torch.randn(4, 3)

    session.fire("forward", model, (x,), {})
    loss = model(x).sum()
    session.fire("forward", model, (x,), {})
    (loss + model(x).sum()).backward()

    assert model.weight.grad is not None


def convolutions(layers=9, width=32):
    """Return a CNN in which a last digit may switch a ReLU, and with it a whole gradient."""
    found, channels = [], 3
    for layer in range(layers):
        stride = 2 if layer % 3 == 2 else 1
        convolution = nn.Conv2d(channels, width, 3, padding=1, stride=stride)
        found += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*found, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def images(step):
    draw = torch.Generator().manual_seed(step)
    return torch.randn(32, 3, 32, 32, generator=draw), torch.randint(10, (32,), generator=draw)


SHORT = replace(PLAIN, steps=2)


@functools.cache
def of_convolutions():
    pictures = Case(model=convolutions, batch=images, loss=F.cross_entropy)
    return Base(pictures, SHORT)


def rounding(candidate, *, with_nudges):
    base = of_convolutions()
    nudged = base.run(replace(SHORT, nudges=True)) if with_nudges else None
    return base.check(candidate, Numerics.ROUNDING, nudged=nudged)


@pytest.mark.slow  # the kernels of a CPU, and with them the last digits, are its own
def test_another_layout_passes_where_last_digits_explain_how_far_it_is_off():
    candidate = of_convolutions().run(replace(SHORT, channels_last=True))

    check = rounding(candidate, with_nudges=True)

    assert check.status == "within", check.why
    assert "the last digits of its inputs and weights move this script's gradients" in check.why


def test_bf16_is_no_rounding_though_last_digits_move_much():
    check = rounding(of_convolutions().run(replace(SHORT, autocast=True)), with_nudges=True)

    assert check.status == "rejected"


def test_last_digits_are_moved_without_the_scripts_generators():
    session, model, x = FakeSession(), nn.Linear(300, 20), torch.randn(40, 300)
    before, state = x.clone(), torch.get_rng_state()
    round_once(session, to_bf16=False)

    session.fire("forward", model, (x,), {})

    moved = (x / before - 1).abs() * 2**23
    assert 15 <= moved.min() <= moved.max() <= 17
    assert 0.4 < (x > before).float().mean() < 0.6
    assert torch.equal(torch.get_rng_state(), state)
