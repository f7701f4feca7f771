"""Whether dropout still acts, seen in what the outputs do under other seeds."""

import contextlib
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.agent.guard import activity
from flatout.agent.guard.activity import (
    SEEDS,
    ActivityRecorder,
    ActivitySpread,
    find_activity,
    find_fault,
    find_unknown,
    is_active,
    looked_at,
)


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
    with contextlib.suppress(RuntimeError, ValueError):  # the session notes what a listener raises
        session.listeners["forward"](model, (torch.randn(16, 8),), {})
    session.listeners["stop"]()
    return find_activity(str(tmp_path / "record.json"))


def test_dropout_moves_the_output_from_seed_to_seed(tmp_path):
    assert 0.1 < activity_of(tmp_path, Net(0.3))["0"] < 2.0


def test_model_without_dropout_does_not_move(tmp_path):
    assert not is_active(activity_of(tmp_path, Net(0.0)))


def test_technique_that_loses_a_functional_dropout_is_found(tmp_path):
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


def stacked_deviation(outputs):
    """Return the deviation by its definition, with all outputs side by side."""
    stacked = torch.stack([torch.cat([x.flatten().double() for x in each]) for each in outputs])
    size = stacked.square().mean().sqrt().item()
    return stacked.var(dim=0).mean().sqrt().item() / size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_outputs_one_after_the_other_give_what_they_give_side_by_side(dtype):
    generator = torch.Generator().manual_seed(0)
    outputs = [
        [torch.randn(5, 6, generator=generator).to(dtype).t(), torch.ones((), dtype=dtype)]
        for _ in range(SEEDS)
    ]
    spread = ActivitySpread()

    for each in outputs:
        spread.add(each)

    assert spread.deviation() == pytest.approx(stacked_deviation(outputs), rel=1e-12)


def test_of_a_large_output_the_same_places_are_looked_at_and_every_column_is_met(monkeypatch):
    monkeypatch.setattr(activity, "MOST_LOOKED_AT", 100)
    numbered = torch.arange(64 * 50).reshape(64, 50)

    places = looked_at(numbered)

    assert 50 <= len(places) <= 100
    assert torch.equal(places, looked_at(numbered.clone()))
    assert len({place % 50 for place in places.tolist()}) == 50
    assert torch.equal(looked_at(numbered[:2]), numbered[:2].flatten())


def test_a_part_of_a_large_output_deviates_as_the_whole_and_by_nothing_without_dropout(monkeypatch):
    monkeypatch.setattr(activity, "MOST_LOOKED_AT", 4_096)
    generator = torch.Generator().manual_seed(0)
    plain = torch.randn(400, 512, generator=generator)
    masks = [torch.rand(400, 512, generator=generator) > 0.3 for _ in range(SEEDS)]
    outputs = [[plain * mask] for mask in masks]
    dropped, kept = ActivitySpread(), ActivitySpread()

    for each in outputs:
        dropped.add(each)
        kept.add([plain])

    assert dropped.deviation() == pytest.approx(stacked_deviation(outputs), rel=0.05)
    assert kept.deviation() == 0.0
    assert dropped._means[0].numel() <= 4_096


def test_equal_outputs_deviate_by_nothing_at_all_and_masked_ones_do_not_hide_the_rest():
    output = torch.tensor([0.1, 1e4, float("-inf")])
    equal, other = ActivitySpread(), ActivitySpread()

    for seed in range(SEEDS):
        equal.add([output])
        other.add([output * (1 + 0.1 * seed)])

    assert equal.deviation() == 0.0
    assert is_active({"0": other.deviation()})


def test_one_output_lives_at_a_time(tmp_path):
    model = Net(0.3)
    alive = []
    most = []

    def call(x):
        out = model(x)["out"]
        alive.append(weakref.ref(out.untyped_storage()))
        most.append(sum(ref() is not None for ref in alive))
        return out

    activity_of(tmp_path, model, call)

    assert most == [1] * SEEDS


def test_a_look_that_fails_is_not_known_and_not_tried_again(tmp_path):
    model = Net(0.3)
    calls = []

    def out_of_memory(x):
        calls.append(x)
        model.norm(x)
        raise torch.OutOfMemoryError("CUDA out of memory")

    statistics = model.norm.running_mean.clone()

    found = activity_of(tmp_path, model, out_of_memory)

    assert found == {"0": None}
    assert "not known" in find_unknown(found)
    assert "not known" in find_fault({"0": 0.3}, found)
    assert torch.equal(model.norm.running_mean, statistics)
    assert len(calls) == 1


def test_outputs_without_numbers_or_of_changing_length_are_not_known(tmp_path):
    model = Net(0.3)
    lengths = iter(range(1, 9))

    assert activity_of(tmp_path, model, lambda x: x.long()) == {"0": None}
    assert activity_of(tmp_path, model, lambda x: torch.ones(next(lengths))) == {"0": None}


def test_numbers_in_an_object_of_the_scripts_own_are_found(tmp_path):
    class Output:
        def __init__(self, logits):
            self.logits = logits

    model = Net(0.3)

    assert is_active(activity_of(tmp_path, model, lambda x: Output(model(x))))


def test_a_record_without_a_root_is_known_and_one_that_is_missing_is_not(tmp_path):
    record = tmp_path / "record.json"
    ActivityRecorder(Heard(Net(0.3), None), record)._on_stop()

    assert find_unknown(find_activity(str(record))) is None
    assert "no record" in find_unknown(None)
