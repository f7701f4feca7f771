"""The shadow step: where its copies are, and what comparing them in parts gives."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.agent.guard import updates
from flatout.agent.guard.sketches import EarlySteps
from flatout.agent.guard.updates import UpdateNotes, place_for
from flatout.records.units import GIB

STEPS = 3


def followed(device="cpu", *, fault=1.0, kind=torch.optim.AdamW):
    """Return what a shadow saw of three steps, the last of which may be changed behind it."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 7)).to(device)
    optimizer = kind(model.parameters(), lr=0.01)
    notes = UpdateNotes(STEPS, None, EarlySteps())
    named = dict(model.named_parameters())
    for step in range(1, STEPS + 1):
        optimizer.zero_grad()
        model(torch.randn(16, 40).to(device)).square().mean().backward()
        notes.before_step(0, step, optimizer, named)
        optimizer.step()
        if step == STEPS:
            named["0.weight"].data.mul_(fault)
        notes.after_step(0, step, optimizer, backwards_inside=0)
    assert notes.gaps == {}
    return notes


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_shadow_takes_the_optimizer_s_own_steps(kind):
    found = followed(kind=kind).updates

    assert [update.step for update in found] == [1, 2, 3]
    for update in found:
        for difference, moved, size, eps in update.tensors.values():
            assert difference <= 8 * eps * (moved + size)
            assert moved > 0


def test_what_changes_a_parameter_behind_the_optimizer_is_seen():
    found = followed(fault=1.01).updates[-1].tensors

    difference, _, size, _ = found["0.weight"]
    assert difference == pytest.approx(0.01 * size, rel=0.1)


def test_compared_in_parts_are_the_norms_of_the_whole(monkeypatch):
    whole = followed(fault=1.01).updates

    monkeypatch.setattr(updates, "CHUNK", 7)

    for one, other in zip(whole, followed(fault=1.01).updates, strict=True):
        for name, numbers in one.tensors.items():
            assert other.tensors[name] == pytest.approx(numbers, rel=1e-12)


def test_no_copy_is_kept_after_the_last_step_that_is_looked_at():
    assert followed()._shadows == {}


def test_parameters_in_float64_are_left_as_they_are():
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4).double()
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    notes = UpdateNotes(1, None, EarlySteps())
    model(torch.ones(1, 4).double()).sum().backward()

    notes.before_step(0, 1, optimizer, dict(model.named_parameters()))
    optimizer.step()
    notes.after_step(0, 1, optimizer, backwards_inside=0)

    assert torch.equal(model.weight, before)
    assert notes.updates[0].tensors["weight"][0] == 0.0


def parameters(device="cuda", count=1 << 20):
    with FakeTensorMode(allow_non_fake_inputs=True):
        return [torch.nn.Parameter(torch.empty(count, device=device)) for _ in range(4)]


@pytest.mark.parametrize(("free", "place"), [(GIB, "cuda:0"), (100 * 2**20, "cpu")])
def test_copies_are_next_to_the_parameters_where_there_is_room(free, place, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (free, 80 * GIB))

    assert str(place_for(parameters())) == place


def test_on_the_cpu_and_of_several_devices_copies_are_on_the_cpu():
    mixed = [SimpleNamespace(device=torch.device(f"cuda:{number}")) for number in (0, 1)]

    assert place_for(parameters("cpu")) == torch.device("cpu")
    assert place_for(mixed) == torch.device("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_shadow_on_the_device_takes_the_same_steps(kind, monkeypatch):
    placed = []
    monkeypatch.setattr(
        updates, "place_for", lambda given: placed.append(place_for(given)) or placed[-1]
    )

    found = followed("cuda", kind=kind).updates

    assert placed[0].type == "cuda"
    for update in found:
        for difference, moved, size, eps in update.tensors.values():
            assert difference <= 8 * eps * (moved + size)
