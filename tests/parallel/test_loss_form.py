"""Sums and means over the samples of a batch, told apart by a loss's graph."""

import pytest
import torch
from torch import nn

from flatout.parallel.loss_form import MEAN, SUM, UNKNOWN, forms_of

SAMPLES = 16


@pytest.fixture
def outputs():
    return torch.randn(SAMPLES, 5, requires_grad=True)


def per_sample(outputs):
    return nn.functional.cross_entropy(outputs, torch.zeros(SAMPLES).long(), reduction="none")


LOSSES = {
    "mean": (lambda x: per_sample(x).mean(), {MEAN}),
    "torch's mean": (lambda x: nn.functional.mse_loss(x, x.detach() + 1), {MEAN}),
    "sum": (lambda x: per_sample(x).sum(), {SUM}),
    "torch's sum": (lambda x: nn.functional.mse_loss(x, x.detach() + 1, reduction="sum"), {SUM}),
    "sum of sums": (lambda x: x.square().sum(1).sum(0), {SUM}),
    "variational": (
        lambda x: (
            nn.functional.binary_cross_entropy(x.sigmoid(), torch.ones_like(x), reduction="sum")
            - 0.5 * torch.sum(1 + x - x.pow(2) - x.exp())
        ),
        {SUM},
    ),
    "scaled": (lambda x: per_sample(x).sum() * torch.tensor(65536.0), {SUM}),
    "a mean of features, summed": (lambda x: x.square().mean(0).sum(), {MEAN}),
    "two means": (lambda x: torch.stack([x.mean(), x.square().mean()]).sum(), {MEAN}),
    "halved": (lambda x: 0.5 * per_sample(x).sum() / 4, {SUM}),
    "weighted mean": (lambda x: (per_sample(x) * torch.full((SAMPLES,), 0.1)).sum(), {UNKNOWN}),
    "mean and sum": (lambda x: per_sample(x).mean() + 0.1 * x.square().sum(), {MEAN, SUM}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_says_what_it_makes_of_its_samples(name, outputs):
    make, expected = LOSSES[name]

    forms, names = forms_of(make(outputs), SAMPLES)

    assert forms == expected
    assert names


@pytest.mark.parametrize("divide", [lambda x: x / SAMPLES, lambda x: x * (1 / SAMPLES)])
def test_a_factor_that_follows_the_number_of_samples_is_told_from_a_constant(outputs, divide):
    _, nodes = forms_of(divide(per_sample(outputs).sum()), SAMPLES)
    half = outputs[: SAMPLES // 2]
    halves = nn.functional.cross_entropy(half, torch.zeros(len(half)).long(), reduction="none")

    of_half, of_constant = halves.sum() / len(half), divide(halves.sum())

    assert forms_of(of_half, len(half))[1] != nodes
    assert forms_of(of_constant, len(half))[1] == nodes


def test_a_factor_is_read_again_and_one_that_a_hook_packed_is_not(outputs):
    loss = 0.5 * per_sample(outputs).sum()
    assert forms_of(loss, SAMPLES) == forms_of(loss, SAMPLES)
    unpacked = []

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpacked.append):
        packed = per_sample(outputs).sum() * torch.tensor(0.5)

    forms_of(packed, SAMPLES)
    assert unpacked == []


def test_a_long_graph_is_not_followed_to_its_end(outputs):
    loss = sum((outputs.square().norm() for _ in range(1_000)), start=torch.zeros(()))

    _, names = forms_of(loss, SAMPLES)

    assert len(names) < 300
