"""A technique that acts around steps and one that splits them are never both applied."""

import weakref

import pytest
import torch
from torch import nn

from flatout.agent import optimizer_swap
from flatout.records.errors import NotApplicable
from flatout.techniques.batch.batch_size import BatchSize
from flatout.techniques.optimizer.adafactor import Adafactor
from flatout.techniques.optimizer.optimizer_in_backward import OptimizerInBackward
from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import step_in_backward
from flatout.techniques.precision import fp16_autocast
from flatout.techniques.precision.fp16_autocast import Fp16Autocast
from flatout.techniques.precision.pure_bf16 import PureBf16


def batch_size(net, optimizer):
    BatchSize(samples=64, instead_of=32, learning_rate="linear").optimizer(optimizer)


def pure_bf16(net, optimizer):
    technique = PureBf16()
    technique.model(net)
    technique.optimizer(optimizer)


def adafactor(net, optimizer):
    Adafactor().optimizer(optimizer)


def fp16(net, optimizer):
    technique = Fp16Autocast()
    technique.forward(net, net)
    technique.backward(torch.autograd.backward)


TECHNIQUES = {
    "batch_size": batch_size,
    "pure_bf16": pure_bf16,
    "Adafactor": adafactor,
    "fp16_autocast": fp16,
}


@pytest.fixture(autouse=True)
def nothing_process_wide(monkeypatch):
    """Keep what a technique would do to every optimizer from the tests that follow."""
    monkeypatch.setattr(optimizer_swap, "_OF_ALL", [])
    monkeypatch.setattr(optimizer_swap, "_PARTED", weakref.WeakSet())
    monkeypatch.setattr(fp16_autocast.LossScaling, "install", lambda _, backward, __: backward)


@pytest.fixture
def trained():
    """Return a model with gradients, and its optimizer, which never stepped."""
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 64)).sum().backward()
    return net, optimizer


@pytest.mark.parametrize(("name", "act"), TECHNIQUES.items())
def test_steps_in_backward_are_refused_where_a_technique_acts_around_them(name, act, trained):
    net, optimizer = trained
    act(net, optimizer)
    technique = OptimizerInBackward()
    technique.start()

    with pytest.raises(NotApplicable, match=f"{name}.* needs whole steps"):
        technique.optimizer(optimizer)


@pytest.mark.parametrize("act", TECHNIQUES.values())
def test_a_technique_that_acts_around_steps_is_refused_where_they_are_in_backward(act, trained):
    net, optimizer = trained
    step_in_backward(optimizer)

    with pytest.raises(NotApplicable, match="each parameter is updated in the backward pass"):
        act(net, optimizer)


def test_what_is_taken_back_stands_against_nothing(trained):
    net, optimizer = trained

    step_in_backward(optimizer)()
    batch_size(net, optimizer)

    assert optimizer_swap.find_need(optimizer).startswith("batch_size")


def test_another_optimizer_s_steps_are_its_own_matter(trained):
    net, optimizer = trained
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)

    batch_size(net, other)

    assert optimizer_swap.find_need(other).startswith("batch_size")
    assert optimizer_swap.find_need(optimizer) is None
