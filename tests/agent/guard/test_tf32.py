"""Which layers round to TF32, on a device that is not here."""

import pytest
import torch
from torch import nn

from flatout.agent import tf32
from flatout.agent.tf32 import rounds_to_tf32

CONVOLUTION = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
LINEAR = nn.Sequential(nn.Linear(3, 4))


@pytest.fixture
def ampere(monkeypatch):
    """Take every device for one that has TF32; torch's switches are its defaults, and put back."""
    monkeypatch.setattr(tf32, "has_tf32", lambda device: True)
    convolution, product = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = True  # another test of this process may have left it
    torch.set_float32_matmul_precision("highest")
    yield
    torch.backends.cudnn.allow_tf32 = convolution
    torch.set_float32_matmul_precision(product)


@pytest.mark.usefixtures("ampere")
def test_convolutions_round_by_default_and_products_do_not():
    assert rounds_to_tf32([CONVOLUTION])
    assert rounds_to_tf32([nn.LSTM(2, 3)])
    assert not rounds_to_tf32([LINEAR])


@pytest.mark.usefixtures("ampere")
def test_the_scripts_own_switches_decide():
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("high")

    assert not rounds_to_tf32([CONVOLUTION])
    assert rounds_to_tf32([LINEAR])


@pytest.mark.usefixtures("ampere")
def test_half_precision_layers_have_no_fp32_products():
    assert not rounds_to_tf32([nn.Conv2d(3, 4, 3).to(torch.bfloat16)])


def test_a_cpu_has_no_tf32():
    torch.set_float32_matmul_precision("highest")

    assert not rounds_to_tf32([CONVOLUTION, LINEAR])


def test_devices_before_ampere_and_those_of_amd_have_none(monkeypatch):
    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not tf32.has_tf32(device)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    assert tf32.has_tf32(device)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not tf32.has_tf32(device)
