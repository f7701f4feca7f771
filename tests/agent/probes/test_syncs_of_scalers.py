"""A gradient scaler asks for overflows in every step: no script can leave that wait out."""

import torch
from torch import nn

from flatout.agent.probes import syncs
from flatout.agent.session import Session
from flatout.records.trial_spec import TrialSpec


def waits_of(step, monkeypatch):
    """Return what the probe notes of a step; the CPU stands for a device that is waited for."""
    monkeypatch.setattr(syncs, "_is_far", lambda value: isinstance(value, torch.Tensor))
    probe = syncs.SyncProbe(Session(TrialSpec()), {})
    probe.on_device = True
    probe._watch(torch.Tensor, "item", "item")
    try:
        step()
    finally:
        probe.result()
    return [what for _line, what, _seconds in probe.of_step]


def scaled_step():
    model = nn.Linear(4, 1)
    scaler = torch.amp.GradScaler("cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


def test_what_the_script_reads_is_noted(monkeypatch):
    assert waits_of(lambda: torch.ones(()).item(), monkeypatch) == ["item"]


def test_what_a_gradient_scaler_asks_for_is_not(monkeypatch):
    assert waits_of(scaled_step, monkeypatch) == []

    monkeypatch.setattr(syncs, "_is_of_scaler", lambda _caller: False)
    assert waits_of(scaled_step, monkeypatch) == ["item"]
