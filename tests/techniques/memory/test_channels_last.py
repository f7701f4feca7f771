import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.readings import TraceSummary
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

    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


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
    technique = ChannelsLast()
    root = nn.Sequential(*network(), Undoing(), nn.Conv2d(4, 2, 3))
    images = torch.randn(2, 3, 9, 9)
    call = technique.forward(root, root)
    call(images)
    call(images)

    said = technique.end()

    assert said.startswith("1 of 3 convolutions were given images with the channels first")
    assert said.endswith("among them 5")
    assert not any(module._forward_pre_hooks for module in root.modules())


def test_weights_of_3d_convolutions_stay_as_they_are():
    torch.manual_seed(0)
    frames, volume = nn.Conv2d(3, 4, 3), nn.Conv3d(1, 2, 3)
    root = nn.ModuleList([frames, volume])

    ChannelsLast().forward(lambda images: frames(images), root)(torch.randn(2, 3, 9, 9))

    assert frames.weight.is_contiguous(memory_format=torch.channels_last)
    assert volume.weight.is_contiguous()


def test_it_has_nothing_to_tell_where_all_keep_the_format():
    technique = ChannelsLast()
    root = network()
    technique.forward(root, root)(torch.randn(2, 3, 9, 9))

    assert not technique.end()


def test_kernels_that_convert_now_are_predicted_to_go():
    net = model(conv_weights=53)
    plain = profile(kind="cuda", models=(net,))

    def saved(share):
        trace = TraceSummary(steps=1, step_ms=100.0, layout_conversion_share=share)
        return -ChannelsLast().predict(replace(plain, trace=trace), machine()).step_ms

    assert saved(0.4) == pytest.approx(40.0)
    assert saved(0.02) == saved(None) == pytest.approx(100 / 6)


def batch(step):
    return torch.randn(4, 3, 9, 9, generator=torch.Generator().manual_seed(step))


def stepped(call, optimizer, steps):
    for step in steps:
        optimizer.zero_grad()
        call(batch(step)).square().mean().backward()
        optimizer.step()


def begun(saved=None):
    """Return a model and a fused optimizer as a script makes them, or loads them."""
    net = network()
    # The gradient of a bias before a normalisation is all rounding, which Adam would blow up.
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-3, fused=True)
    if saved is not None:
        net.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
    return net, optimizer


def saved_of(net, optimizer):
    return copy.deepcopy((net.state_dict(), optimizer.state_dict()))


def assert_close(found, expected):
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("steps_first", [False, True])
def test_moments_that_were_loaded_lie_as_the_weights_do(steps_first):
    plain, stepper = begun()
    stepped(plain, stepper, range(3))
    root, optimizer = begun(saved_of(plain, stepper))
    technique = ChannelsLast()

    # A step before the first call comes first at the optimizer's hook point.
    call = root if steps_first else technique.forward(root, root)
    technique.optimizer(optimizer)
    call = technique.forward(root, root) if steps_first else call
    stepped(call, optimizer, range(3, 6))
    stepped(plain, stepper, range(3, 6))

    moment = optimizer.state[root[0].weight]["exp_avg"]
    assert moment.stride() == root[0].weight.stride() != plain[0].weight.stride()
    assert_close(root, plain)


def converted_after(steps):
    technique = ChannelsLast()
    root, optimizer = begun()
    call = technique.forward(root, root)
    technique.optimizer(optimizer)
    stepped(call, optimizer, range(steps))
    return root, optimizer, call


def test_what_is_saved_goes_on_in_a_plain_training():
    root, optimizer, call = converted_after(3)

    saved = saved_of(root, optimizer)
    plain, stepper = begun(saved)
    stepped(plain, stepper, range(3, 6))
    stepped(call, optimizer, range(3, 6))

    states = [value for state in saved[1]["state"].values() for value in state.values()]
    assert all(value.is_contiguous() for value in states)
    assert_close(plain, root)


def test_a_checkpoint_that_is_loaded_later_lies_as_the_weights_do_too():
    root, optimizer, _ = converted_after(2)

    optimizer.load_state_dict(saved_of(root, optimizer)[1])

    assert optimizer.state[root[0].weight]["exp_avg"].stride() == root[0].weight.stride()


def test_where_no_model_was_converted_the_optimizer_is_no_sign_that_it_acted():
    technique = ChannelsLast()
    _, optimizer = begun()
    technique.optimizer(optimizer)
    with pytest.raises(NotApplicable, match="no training call"):
        technique.end()

    plain = nn.Linear(2, 2)
    with pytest.raises(NotApplicable):
        technique.forward(plain, plain)

    with pytest.raises(NotApplicable, match="no 2-d convolutions"):
        technique.optimizer(optimizer)


def test_an_optimizer_that_keeps_a_value_of_its_own_is_saved():
    technique = ChannelsLast()
    root, optimizer = begun()
    technique.forward(root, root)
    optimizer.state["step"] = 3
    technique.optimizer(optimizer)

    assert optimizer.state_dict()["state"]["step"] == 3
