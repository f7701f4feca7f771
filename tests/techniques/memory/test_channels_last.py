import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from flatout.core.errors import NotApplicable
from flatout.core.trace import TraceSummary
from flatout.techniques.memory.channels_last import ChannelsLast, with_channels_last_inputs
from tests.techniques.facts import machine, model, profile

PROMISE = ("pictures.py", {})

LAST = torch.channels_last


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
    )


def gradients(module, call):
    x = torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(1))
    call(x).square().sum().backward()
    return [p.grad for p in module.parameters()]


def test_gradients_match_up_to_rounding():
    plain = network()
    converted = copy.deepcopy(plain)

    expected = gradients(plain, plain)
    found = gradients(converted, ChannelsLast().forward(converted, converted))

    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_weights_and_activations_lie_with_their_channels_last():
    root = network()
    parameters = list(root.parameters())
    seen = []
    for layer in (root[0], root[3]):
        layer.register_forward_hook(
            lambda _m, i, _o: seen.append(i[0].is_contiguous(memory_format=LAST))
        )

    ChannelsLast().forward(root, root)(torch.randn(2, 3, 9, 9))

    assert seen == [True, True]
    assert root[0].weight.is_contiguous(memory_format=LAST)
    assert all(a is b for a, b in zip(root.parameters(), parameters, strict=True))


def test_nested_inputs_are_converted_and_others_left_alone():
    image, tokens = torch.randn(2, 3, 5, 5), torch.ones(2, 7)
    seen = {}

    with_channels_last_inputs(lambda batch, **named: seen.update(batch, **named))(
        {"image": image, "tokens": tokens}, mask=[image]
    )

    assert seen["image"].is_contiguous(memory_format=LAST)
    assert seen["mask"][0].is_contiguous(memory_format=LAST)
    assert seen["tokens"] is tokens


def test_there_is_nothing_to_change_without_2d_convolutions():
    root = nn.Sequential(nn.Linear(4, 4), nn.Conv1d(2, 2, 1))

    with pytest.raises(NotApplicable, match="no 2-d convolutions"):
        ChannelsLast().forward(root, root)


def test_there_is_nothing_to_change_when_the_script_did_it():
    root = network().to(memory_format=LAST)

    with pytest.raises(NotApplicable, match="already"):
        ChannelsLast().forward(root, root)


def test_it_is_offered_to_convolutional_models():
    facts = profile(models=(model(conv_weights=20),))

    (found,) = ChannelsLast.candidates(facts, machine())

    assert found.predict(facts, machine()).step_ms == pytest.approx(-100 / 6)


@pytest.mark.parametrize("facts", [model(), model(conv_weights=20, is_channels_last=True)])
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert ChannelsLast.candidates(profile(models=(facts,)), machine()) == ()


class Undoing(nn.Module):
    """Brings the channels first again, as operations without the other format do."""

    def forward(self, images):
        return images.contiguous()


def test_it_tells_which_convolutions_are_given_the_other_format():
    root = nn.Sequential(*network(), Undoing(), nn.Conv2d(4, 2, 3))
    images = torch.randn(2, 3, 9, 9)
    call = ChannelsLast().forward(root, root)
    call(images)
    call(images)

    said = ChannelsLast().end()

    assert said.startswith("1 of 3 convolutions were given images with the channels first")
    assert said.endswith("among them 5")
    assert not any(module._forward_pre_hooks for module in root.modules())


def test_it_has_nothing_to_tell_where_all_keep_the_format():
    root = network()
    ChannelsLast().forward(root, root)(torch.randn(2, 3, 9, 9))

    assert not ChannelsLast().end()


def test_kernels_that_convert_now_are_predicted_to_go():
    net = model(conv_weights=53)
    plain = profile(kind="cuda", models=(net,))

    def saved(share):
        trace = TraceSummary(steps=1, step_ms=100.0, layout_conversion_share=share)
        return -ChannelsLast().predict(replace(plain, trace=trace), machine()).step_ms

    assert saved(0.4) == pytest.approx(40.0)
    assert saved(0.02) == saved(None) == pytest.approx(100 / 6)
