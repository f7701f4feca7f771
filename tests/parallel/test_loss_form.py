"""Sums and means over the samples of a batch, told apart by a loss's graph."""

import itertools

import pytest
import torch
from torch import nn

from flatout.parallel.loss_form import (
    CURVED,
    MEAN,
    SUM,
    UNKNOWN,
    are_constant,
    forms_of,
    tables_of,
)

SAMPLES = 16
MASK = (torch.arange(SAMPLES) < 5).float()
PENALTY = nn.Parameter(torch.ones(SAMPLES, 4))


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
    "penalty on parameters": (
        lambda x: (
            per_sample(x).mean() + 0.1 * (PENALTY.pow(2).sum() + (PENALTY * PENALTY).abs().sum())
        ),
        {MEAN, UNKNOWN},
    ),
    "mean over a mask": (lambda x: (per_sample(x) * MASK).sum() / MASK.sum(), {MEAN}),
    "mean over chosen": (lambda x: per_sample(x)[MASK > 0].sum() / MASK.sum(), {MEAN}),
    "of distributions": (
        lambda x: nn.functional.kl_div(
            x.log_softmax(1), x.detach().softmax(1), reduction="batchmean"
        ),
        {SUM},
    ),
    "one over a mean": (lambda x: 1 / x.square().mean(), {CURVED}),
    "root of a mean": (lambda x: (x.square().mean() + 1e-8).sqrt(), {CURVED}),
    "ratio of sums": (lambda x: 1 - 2 * x.sum() / (x.square().sum() + 1), {CURVED}),
    "learned weight": (lambda x: x.square().mean() * PENALTY[0, 0].exp(), {UNKNOWN}),
    "root of a penalty": (lambda x: x.mean() + PENALTY.pow(2).sum().sqrt(), {MEAN, UNKNOWN}),
    "mean and sum": (lambda x: per_sample(x).mean() + 0.1 * x.square().sum(), {MEAN, SUM}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_says_what_it_makes_of_its_samples(name, outputs):
    make, expected = LOSSES[name]

    form = forms_of(make(outputs), SAMPLES)

    assert form.forms == expected
    assert form.nodes


@pytest.mark.parametrize("divide", [lambda x: x / SAMPLES, lambda x: x * (1 / SAMPLES)])
def test_a_factor_that_follows_the_number_of_samples_is_told_from_a_constant(outputs, divide):
    whole = forms_of(divide(per_sample(outputs).sum()), SAMPLES)
    half = outputs[: SAMPLES // 2]
    halves = nn.functional.cross_entropy(half, torch.zeros(len(half)).long(), reduction="none")

    of_half, of_constant = halves.sum() / len(half), divide(halves.sum())

    for loss, expected in ((of_half, False), (of_constant, True)):
        form = forms_of(loss, len(half))
        assert are_constant(form.sums, whole.sums, len(half), SAMPLES) is expected


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x, scheduled: x.square().sum() + scheduled * x.exp().sum(), True),
        (lambda x, scheduled: x.square().sum() + x.exp().sum() / len(x), False),
        (lambda x, scheduled: scheduled * (x.square().sum() + x.exp().sum()), False),
    ],
)
def test_a_weight_that_follows_a_schedule_leaves_the_other_sums_alone(outputs, make, expected):
    whole = forms_of(make(outputs, 0.0), SAMPLES)
    form = forms_of(make(outputs[: SAMPLES // 2], 0.1), SAMPLES // 2)

    assert are_constant(form.sums, whole.sums, SAMPLES // 2, SAMPLES) is expected


def test_a_cross_entropy_says_what_its_samples_weigh_again_and_again(outputs):
    targets = torch.arange(SAMPLES) % 5
    targets[:4] = -100
    classes = torch.arange(5) + 1.0
    cross_entropy = nn.functional.cross_entropy
    loss = cross_entropy(outputs, targets, classes) + 0.4 * cross_entropy(
        outputs * 2, targets, classes
    )

    weights = [forms_of(loss, SAMPLES).weight for _ in range(2)]

    assert [float(weight) for weight in weights] == [float(classes[targets[4:]].sum())] * 2
    assert forms_of(loss + outputs.square().mean(), SAMPLES).weight is None
    assert forms_of(cross_entropy(outputs, targets, reduction="sum"), SAMPLES).weight is None
    assert forms_of(loss + cross_entropy(outputs, targets), SAMPLES).weight.isnan()


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda x: (per_sample(x) * MASK).sum() / MASK.sum(), 5),
        (lambda x: 0.5 * per_sample(x).sum() / 12 / torch.tensor(4), 48),
        (lambda x: (per_sample(x) * MASK).sum() / 5 + per_sample(x)[:5].sum() / 5, 5),
        (lambda x: (per_sample(x) * MASK).sum() / 5 + per_sample(x)[:4].sum() / 4, torch.nan),
        (lambda x: (per_sample(x) * MASK).sum() / 5 + x.square().mean(), None),
    ],
)
def test_a_sum_weighs_what_it_is_divided_by(outputs, make, expected):
    for _ in range(2):
        weight = forms_of(make(outputs), SAMPLES).weight
        weight = weight if weight is None else weight.nan_to_num(-1)

        assert (weight is None) == (expected is None)
        assert weight is None or torch.equal(weight, torch.tensor(expected).double().nan_to_num(-1))


@pytest.mark.parametrize("classes", [None, torch.arange(5) + 1.0])
def test_smoothed_labels_weigh_what_they_weigh_without(outputs, classes):
    targets = torch.arange(SAMPLES) % 5
    targets[:4] = -100
    of = [
        nn.functional.cross_entropy(outputs, targets, classes, label_smoothing=smoothing)
        for smoothing in (0.0, 0.1)
    ]

    plain, smoothed = (forms_of(loss, SAMPLES).weight for loss in of)

    assert smoothed == plain


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

    assert len(forms_of(loss, SAMPLES).nodes) < 300


def contrastive(features):
    views = torch.cat((features, features + 0.1))
    return nn.functional.cross_entropy(views @ views.t(), torch.arange(len(views)).flip(0))


def hardest(features):
    apart = torch.cdist(features, features)
    return (apart.amax(1) - apart.amin(1) + 1).relu().mean()


def pairs_of_two_towers(features):
    return nn.functional.cross_entropy(features @ features.cos().t(), torch.arange(len(features)))


@pytest.mark.parametrize("compare", [contrastive, hardest, pairs_of_two_towers])
def test_what_compares_samples_has_a_table_of_them_at_one_place(outputs, compare):
    whole = tables_of(compare(outputs), SAMPLES)

    assert whole & tables_of(compare(outputs[:8]), 8)


def test_layers_as_wide_as_a_batch_or_its_part_are_no_table_of_samples():
    sizes = (4, SAMPLES, SAMPLES // 2, SAMPLES, 4)
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(sizes)))
    x = torch.randn(SAMPLES, 4)

    whole, part = (tables_of(model(rows).square().mean(), len(rows)) for rows in (x, x[:8]))

    assert whole
    assert part
    assert not whole & part
