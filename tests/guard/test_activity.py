"""Whether dropout still acts, seen in what the outputs do under other seeds."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.guard.activity import ActivityRecorder, find_activity, find_fault, is_active


class Heard:
    """As much of a session as the recorder needs."""

    def __init__(self, model, call):
        self.roots = [model]
        self.training_calls = {id(model): call}
        self.listeners = {}

    def on(self, event, listener):
        self.listeners[event] = listener


class Net(nn.Module):
    def __init__(self, rate):
        super().__init__()
        self.rate = rate
        self.norm = nn.BatchNorm1d(8)
        self.linear = nn.Linear(8, 4)

    def forward(self, x):
        return {"out": self.linear(functional.dropout(self.norm(x), self.rate, self.training))}


def activity_of(tmp_path, model, call=None):
    session = Heard(model, call or model)
    ActivityRecorder(session, tmp_path / "record.json")
    torch.manual_seed(7)
    session.listeners["forward"](model, (torch.randn(16, 8),), {})
    session.listeners["stop"]()
    return find_activity(str(tmp_path / "record.json"))


def test_dropout_moves_the_output_from_seed_to_seed(tmp_path):
    assert 0.1 < activity_of(tmp_path, Net(0.3))["0"] < 2.0


def test_model_without_dropout_does_not_move(tmp_path):
    assert not is_active(activity_of(tmp_path, Net(0.0)))


def test_lever_that_loses_a_functional_dropout_is_found(tmp_path):
    model = Net(0.3)

    def without_dropout(x):
        return {"out": model.linear(model.norm(x))}

    baseline = activity_of(tmp_path, model)
    candidate = activity_of(tmp_path, model, without_dropout)

    assert "dropout no longer acts" in find_fault(baseline, candidate)


def test_looking_leaves_streams_and_buffers_as_they_were(tmp_path):
    model = Net(0.3)
    statistics = model.norm.running_mean.clone()
    torch.manual_seed(7)
    torch.randn(16, 8)
    expected = torch.rand(3)

    activity_of(tmp_path, model)

    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(model.norm.running_mean, statistics)


@pytest.mark.parametrize("found", [{}, {"1": 0.3}])
def test_root_that_was_not_seen_is_no_proof(found):
    assert "not known" in find_fault({"0": 0.3}, found)


def test_record_that_is_not_there_is_no_activity(tmp_path):
    assert find_activity(None) is None
    assert find_activity(str(tmp_path / "missing.json")) is None
