"""One batch on its way from a forked process: one that dies, one that is silent, other devices."""

import os
import time
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flatout.agent.probes import pipeline
from flatout.agent.probes.pipeline import PipelineProbe, find_other_device, is_repeated


class Deadly:
    """Ends the process that sends it; the one that forked it never does."""

    def __reduce__(self):
        os._exit(3)


class Silent:
    def __reduce__(self):
        time.sleep(60)
        return Silent, ()


class OnDevice(torch.Tensor):
    """As a tensor of a device for numpy, which cannot read one."""

    def __array__(self, dtype=None):
        raise TypeError("can't convert cuda:0 device type tensor to numpy")


def sent(batch):
    probe = SimpleNamespace(missing={})
    return PipelineProbe.sent(probe, batch), probe.missing


def test_a_batch_costs_something():
    cost_s, missing = sent([torch.zeros(2, 1000)])

    assert cost_s >= 0
    assert missing == {}


def test_a_sender_that_dies_ends_the_wait():
    cost_s, missing = sent([torch.zeros(2), Deadly()])

    assert cost_s is None
    assert "could not be sent" in missing["transport"]


def test_a_sender_that_is_silent_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pipeline, "WAIT_S", 0.2)

    cost_s, missing = sent([torch.zeros(2), Silent()])

    assert cost_s is None
    assert "did not answer" in missing["transport"]


def test_a_batch_on_a_device_is_not_sent():
    cost_s, missing = sent({"x": [torch.zeros(2), torch.zeros(2, device="meta")]})

    assert cost_s is None
    assert missing["transport"] == "the batch is on meta: no worker sends it"
    assert find_other_device([torch.zeros(2), "text"]) == ""


@pytest.mark.parametrize(
    "samples",
    [
        torch.zeros(4, 2, dtype=torch.bfloat16),
        torch.zeros(4, 2, requires_grad=True),
        torch.zeros(4).as_subclass(OnDevice),
    ],
)
def test_samples_are_compared_that_numpy_cannot_read(samples):
    assert is_repeated(DataLoader(TensorDataset(samples), batch_size=2)) is True


def test_samples_without_values_are_not_known_to_repeat():
    samples = torch.zeros(4, 2, device="meta")

    assert is_repeated(DataLoader(TensorDataset(samples), batch_size=2)) is None


def test_samples_that_differ_are_told():
    class Noisy(TensorDataset):
        def __getitem__(self, index):
            return torch.rand(2)

    assert is_repeated(DataLoader(Noisy(torch.zeros(4)), batch_size=2)) is False
