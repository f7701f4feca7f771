import copy

import pytest
import torch
from torch import nn

from flatout.agent.describe import describe
from flatout.records.errors import NotApplicable
from flatout.techniques.model.pad_hidden import PadHidden, pad_layers
from tests.techniques.facts import machine, model, profile
from tests.techniques.saved import assert_loads_alone

PROMISE = ("naive_gpt.py --inner 101", {})


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 21), nn.GELU(), nn.Linear(21, 30, bias=False), nn.Tanh(), nn.Linear(30, 3)
    )


def results(module):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
    output = module(x)
    output.square().sum().backward()
    return [output, x.grad, *(p.grad for p in module.parameters())]


def test_outputs_and_gradients_stay_the_same_up_to_rounding():
    plain = network()
    padded = copy.deepcopy(plain)

    count = pad_layers(padded)

    assert count == 2
    for one, other in zip(results(padded), results(plain), strict=True):
        torch.testing.assert_close(one, other)
    assert list(padded.state_dict()) == list(plain.state_dict())


def test_the_products_have_aligned_widths(monkeypatch):
    seen = []
    operation = nn.functional.linear
    padded = PadHidden().model(network())
    monkeypatch.setattr(
        nn.functional,
        "linear",
        lambda x, w, b=None: seen.append((x.shape[-1], *w.shape)) or operation(x, w, b),
    )

    padded(torch.randn(5, 16))

    assert seen[:2] == [(16, 24, 16), (24, 32, 24)]


def test_a_whole_model_that_was_saved_loads_without_flatout(tmp_path):
    plain = network()
    padded = copy.deepcopy(plain)
    pad_layers(padded)

    assert_loads_alone(padded, plain, torch.ones(2, 16), tmp_path)


def test_a_model_of_even_widths_is_left_alone():
    with pytest.raises(NotApplicable, match="multiples of 8"):
        PadHidden().model(nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 3)))


def test_it_is_offered_on_a_gpu_where_odd_layers_hold_many_weights():
    facts = describe(network())
    assert facts["odd_parameters"] == 16 * 21 + 21 * 30

    def of(kind="cuda", odd=500, **changes):
        odd_model = model(parameters=1000, odd_parameters=odd, **changes)
        return profile(kind=kind, models=(odd_model,))

    (found,) = PadHidden.candidates(of(), machine())
    assert found.predict(of(), machine()).step_ms == pytest.approx(-50 * (1 - 1 / 1.1))
    for other in (of(kind="cpu"), of(odd=10), of(is_compiled=True)):
        assert PadHidden.candidates(other, machine()) == ()
