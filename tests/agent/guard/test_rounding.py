import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from flatout.agent.guard.pinning import round_once
from flatout.guard.judge import judge_trials
from flatout.guard.limits import GRADIENT_CEILING
from flatout.guard.obstacles import Trials
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
    return Case(model=model, batch=batch, loss=F.cross_entropy, last="head.weight")


@functools.cache
def runs(model):
    return Base(case(model), PLAIN)


def judged(base, candidate, *, with_rounding):
    rounded = base.run(replace(PLAIN, rounds=True)) if with_rounding else None
    return judge_trials(
        Trials(
            baseline=base.record,
            candidate=candidate,
            calibration=base.calibration,
            repeat=base.repeat,
            promise=Numerics.PRECISION,
            changes_threads=False,
            rounded=rounded,
        )
    )


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
