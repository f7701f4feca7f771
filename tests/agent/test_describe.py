"""What is said of a model before it trains."""

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.nn.utils.parametrize import register_parametrization

from flatout.agent.describe import describe, describe_optimizer


def test_a_frozen_base_in_bf16_is_no_fp32_model():
    base = nn.Linear(8, 8, dtype=torch.bfloat16).requires_grad_(requires_grad=False)

    facts = describe(nn.Sequential(base, nn.Linear(8, 2)))

    assert facts["dtypes"] == ["bfloat16", "float32"]
    assert facts["parameters"] == 18
    assert facts["all_parameters"] == 18 + 72


def test_a_frozen_base_of_quantised_integers_is_no_fp32_model():
    model = nn.Linear(8, 2)
    packed = torch.zeros(4, 8, dtype=torch.uint8)
    model.base = nn.Parameter(packed, requires_grad=False)

    assert describe(model)["dtypes"] == ["float32", "uint8"]


@pytest.mark.parametrize("wraps_forward", [False, True])
def test_a_framework_s_own_autocast_inside_forward_is_seen(wraps_forward):
    model = nn.Sequential(nn.Linear(8, 2))
    if wraps_forward:
        model._original_forward = model.forward

    assert describe(model)["used_autocast"] is wraps_forward


def test_the_script_s_autocast_around_the_call_is_seen():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert describe(nn.Linear(8, 2))["used_autocast"] is True


def test_a_few_integers_among_the_parameters_are_no_weights():
    model = nn.Linear(4, 4)
    model.seed = nn.Parameter(torch.tensor([1, 2]), requires_grad=False)

    assert describe(model)["dtypes"] == ["float32"]


@pytest.mark.parametrize(("asked", "expected"), [(None, None), (1, True), (0, False)])
def test_a_number_for_a_switch_of_the_optimizer_is_a_switch(asked, expected):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1, foreach=asked)

    assert describe_optimizer(optimizer)["is_foreach"] is expected


class Noisy(nn.Module):
    """Makes a weight with noise each time it is read."""

    def forward(self, weight):
        return weight + torch.randn_like(weight)


def test_what_reading_a_weight_moves_is_as_it_was_before():
    model = nn.Sequential(spectral_norm(nn.Conv2d(3, 8, 3)), nn.Linear(4, 4))
    register_parametrization(model[1], "weight", Noisy())
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    stream = torch.get_rng_state()

    facts = describe(model)

    assert facts["conv_weights"] == 1
    assert before
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert torch.equal(torch.get_rng_state(), stream)
