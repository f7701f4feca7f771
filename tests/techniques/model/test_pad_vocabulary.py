"""The output layer computes on more columns and gives what it gave."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from flatout.records.errors import NotApplicable
from flatout.records.technique import RunningTraining
from flatout.techniques.model.pad_vocabulary import PadVocabulary, head_share, pad_output
from tests.techniques.facts import machine, model, profile
from tests.techniques.saved import assert_loads_alone

PROMISE = ("elaborate", {})


def network(size=4099, *, bias=True):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, size, bias=bias))


def gradients(net):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    output = net(x)
    functional.cross_entropy(output.view(4, -1), torch.arange(4)).backward()
    return [output.detach(), *(p.grad for p in net.parameters())]


@pytest.mark.parametrize("bias", [True, False])
def test_outputs_and_gradients_are_the_same_up_to_rounding(bias):
    plain = network(bias=bias)
    padded = PadVocabulary().model(copy.deepcopy(plain))

    torch.testing.assert_close(gradients(padded), gradients(plain), rtol=1e-5, atol=1e-7)


def test_the_product_has_aligned_columns(monkeypatch):
    shapes = []
    linear = functional.linear
    monkeypatch.setattr(
        functional, "linear", lambda x, w, b=None: shapes.append(w.shape) or linear(x, w, b)
    )

    output = pad_output(network()[-1])(torch.ones(2, 16))

    assert shapes == [(4160, 16)]
    assert output.shape == (2, 4099)


def test_a_switch_pads_and_leaves_the_layer_as_it_was():
    net = network()
    x = torch.ones(2, 8)
    roots = [nn.Linear(8, 8), nn.Identity(), net]
    switch = PadVocabulary().switch(RunningTraining(roots=roots, optimizers=[]))
    assert "forward" not in vars(net[-1])

    for is_on in (True, False, True, False):
        switch.turn(is_on)
        assert net(x).stride() == ((4160, 1) if is_on else (4099, 1))

    assert "forward" not in vars(net[-1])


def test_parameters_and_keys_stay():
    plain = network()
    before = {name: id(p) for name, p in plain.named_parameters()}

    PadVocabulary().model(plain)

    assert {name: id(p) for name, p in plain.named_parameters()} == before
    assert plain[-1].weight.shape == (4099, 16)


def test_a_copy_computes_with_its_own_weight():
    padded = PadVocabulary().model(network())
    copied = copy.deepcopy(padded)
    with torch.no_grad():
        copied[-1].weight.zero_()
        copied[-1].bias.zero_()

    assert copied(torch.ones(1, 8)).count_nonzero() == 0
    assert padded(torch.ones(1, 8)).count_nonzero() > 0


def test_a_whole_model_that_was_saved_loads_without_flatout(tmp_path):
    plain = network()
    padded = copy.deepcopy(plain)
    PadVocabulary().model(padded)

    assert_loads_alone(padded, plain, torch.ones(2, 8), tmp_path)


@pytest.mark.parametrize(
    ("size", "why"), [(4160, "multiple of 64 already"), (100, "no output layer of 4096")]
)
def test_others_are_left_alone_with_the_reason(size, why):
    with pytest.raises(NotApplicable, match=why):
        PadVocabulary().model(network(size))


def test_it_is_offered_to_odd_vocabularies():
    facts = model(parameters=100, head_parameters=40, widest_output=50257)
    odd = profile(models=(facts,))

    (found,) = PadVocabulary.candidates(odd, machine())

    assert head_share(facts) == 0.4
    assert found.predict(odd, machine()).step_ms == pytest.approx(-40 * (1 - 1 / 1.15))
    lowered = profile(device_kind="cuda", models=(replace(facts, used_autocast=True),))
    assert found.predict(lowered, machine()).step_ms == pytest.approx(-40 * (1 - 1 / 5))
    even = profile(models=(model(widest_output=50304),))
    assert PadVocabulary.candidates(even, machine()) == ()
