"""Whether a script that makes its batches itself may have its models called with parts of them."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import nn

from flatout.parallel import training
from flatout.parallel.batches import Part
from flatout.parallel.engines import Replicas
from flatout.parallel.training import ParallelTraining


@dataclass
class Output:
    logits: torch.Tensor


class Model(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.layer, self.make = nn.Linear(2, 3), make

    def forward(self, x):
        return self.make(self.layer(x))


@pytest.fixture
def alone(monkeypatch):
    """Be one rank of two, without the other: what it would exchange is its own."""
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(dist, "all_gather", lambda found, own: [x.copy_(own) for x in found])
    return ParallelTraining(Part(0, 2), Replicas())


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda y: y, True),
        (Output, True),
        (lambda y: (y.mean(), {"logits": y, "scale": 0.5, "name": "x", "none": None}), True),
        (lambda y: (y, len(y)), False),
        (lambda y: y - y.sum(0), False),
        (lambda y: torch.distributions.Normal(y, 1.0), False),
        (lambda y: (y.mean(), torch.distributions.Categorical(logits=y)), False),
    ],
    ids=["tensor", "record", "nested", "count", "across samples", "distribution", "one of several"],
)
def test_outputs_are_put_together_where_all_of_their_samples_are_seen(alone, make, expected):
    model = Model(make)
    batch = torch.ones(4, 2)  # the other rank's part is alike

    assert alone._can_cut(model.__call__, model, 4, ((batch,), {})) is expected


@pytest.mark.parametrize("by", [0.0, 1e-4])
def test_a_model_whose_rows_depend_on_others_by_little_is_not_cut(alone, monkeypatch, by):
    """As an LSTM's do, whose first dimension is time: of a long sequence few notice a cut."""
    model, batch = Model(lambda y: y + by * y.roll(1, 0)), torch.randn(4, 2)
    monkeypatch.setattr(
        training, "gathered", lambda *_: torch.cat((model(batch[:2]), model(batch[2:])))
    )

    assert alone._can_cut(model.__call__, model, 4, ((batch,), {})) is (by == 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((torch.ones(4, 2),), 0),
        ((torch.ones(3, 2),), 1),
        ((torch.ones(4, 2), torch.ones(2, 2)), 1),
        ((torch.ones(4, 2), 0.5), 0),
    ],
    ids=["even", "odd", "a mask", "a number"],
)
def test_batches_without_equal_parts_are_said_to_gain_nothing(alone, monkeypatch, given, said):
    texts = []
    monkeypatch.setattr("flatout.parallel.group.say_once", texts.append)
    monkeypatch.setattr(dist, "broadcast", lambda *_: None)
    model = Model(lambda y: y)
    model.forward = lambda x, *_: model.layer(x)

    loss = alone.forward(model.__call__, model)(*given).sum()
    alone._trained([loss])

    assert ["which gains nothing" in text for text in texts] == [True] * said
