"""Weights in bf16 that still learn from updates smaller than their last bit."""

import contextlib
import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.optimizer.adafactor import Adafactor
from flatout.techniques.optimizer.optimizer_in_backward.updates_in_backward import step_in_backward
from flatout.techniques.precision.pure_bf16 import (
    PureBf16,
    cast_calls,
    round_stochastically,
    step_in_fp32,
    to_bf16,
)
from tests.techniques.facts import GIB, machine, model, optimizer, profile
from tests.techniques.guarded import played
from tests.techniques.small_training import in_first_step

PROMISE = ("naive_gpt.py", {})

FAST = frozenset({"avx512_bf16"})


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_of_many_roundings_is_the_number(sign):
    torch.manual_seed(0)
    value = sign * (1.0 + 0.3 * 2**-7)

    found = round_stochastically(torch.full((100_000,), value))

    assert set(found.unique().tolist()) == {sign * 1.0, sign * (1.0 + 2**-7)}
    assert found.double().mean().item() == pytest.approx(value, abs=1e-4)


def test_what_bf16_can_say_stays_as_it_is():
    exact = torch.tensor([0.0, -0.0, 1.0, -2.5, float("inf"), float("-inf"), 3.3895e38])

    assert torch.equal(round_stochastically(exact), exact.bfloat16())
    assert round_stochastically(torch.tensor([float("nan")])).isnan().all()


def trained_weight(steps=2000, *, stochastic):
    """Return a weight of one after many updates of a thousandth of its last bit each."""
    torch.manual_seed(0)
    weight = nn.Parameter(torch.ones(64, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=2.0**-17)
    if stochastic:
        step_in_fp32(optimizer, [weight])
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    return weight.float().mean().item()


def test_small_updates_add_up_where_plain_bf16_loses_them():
    expected = 1.0 - 2000 * 2.0**-17

    assert trained_weight(stochastic=False) == 1.0
    assert trained_weight(stochastic=True) == pytest.approx(expected, abs=2e-3)


def test_states_are_fp32_and_weights_and_gradients_bf16():
    linear = nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(linear.parameters())
    step_in_fp32(optimizer, to_bf16(linear))
    cast_calls(linear)(torch.randn(2, 8)).sum().backward()

    optimizer.step()

    assert {p.dtype for p in linear.parameters()} == {torch.bfloat16}
    assert {p.grad.dtype for p in linear.parameters()} == {torch.bfloat16}
    assert optimizer.state[linear.weight]["exp_avg"].dtype == torch.float32


def test_a_loaded_state_stays_fp32():
    linear = nn.Linear(8, 4)
    saved = torch.optim.AdamW(linear.parameters())
    linear(torch.randn(2, 8)).sum().backward()
    saved.step()
    state = saved.state_dict()
    optimizer = step_in_fp32(torch.optim.AdamW(linear.parameters()), to_bf16(linear))

    optimizer.load_state_dict(state)

    assert optimizer.state[linear.weight]["exp_avg"].dtype == torch.float32
    assert linear.weight.dtype == torch.bfloat16


def test_running_statistics_stay_fp32_and_outputs_come_back_fp32():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).train()
    to_bf16(net)

    output = cast_calls(net)(torch.randn(2, 3, 8, 8))
    with torch.no_grad():
        evaluated = net.eval()(torch.randn(2, 3, 8, 8))

    assert output.dtype == evaluated.dtype == torch.float32
    assert net[1].running_mean.dtype == torch.float32
    assert net[0].weight.dtype == torch.bfloat16


class Coder(nn.Module):
    """Codes a picture and decodes it, in layers of which some are in a list."""

    def __init__(self):
        super().__init__()
        self.encoder, self.layers = nn.Linear(8, 4), nn.ModuleList([nn.Linear(4, 8)])
        self.kinds = set()

    def forward(self, x):
        code = self.encoder(x)
        self.kinds.add(code.dtype)
        return self.decode(code)

    def decode(self, code):
        for layer in self.layers:
            code = layer(code)
        return code


def test_what_the_script_calls_of_a_model_takes_and_gives_fp32_too():
    """As a VAE that is sampled from between epochs."""
    technique, coder = PureBf16(), Coder()
    technique.model(coder)
    sampled, code = coder.decode(torch.randn(2, 4)), coder.encoder(torch.randn(2, 8))

    trained_step(coder, technique.optimizer(torch.optim.SGD(coder.parameters(), lr=0.1)))
    again = copy.deepcopy(coder).decode(torch.randn(2, 4))

    assert sampled.dtype == code.dtype == again.dtype == torch.float32
    assert coder.kinds == {torch.bfloat16}


class Positions(nn.Module):
    """Holds what rotary positions are made from, and tables."""

    def __init__(self):
        super().__init__()
        frequencies = 10000.0 ** (-torch.arange(0, 128, 2) / 128)
        self.register_buffer("inv_freq", frequencies, persistent=False)
        self.register_buffer("freqs", frequencies.clone())
        self.register_buffer("halves", torch.tensor([0.5, 1.0, -2.0]), persistent=False)
        self.register_buffer("table", torch.rand(4, 4), persistent=False)
        self.register_buffer("weights", torch.rand(4))


def test_frequencies_that_positions_multiply_stay_fp32():
    positions = Positions()
    before = positions.inv_freq.clone()

    to_bf16(positions)

    kept = {name for name, b in positions.named_buffers() if b.dtype == torch.float32}
    assert kept == {"inv_freq", "freqs"}
    assert torch.equal(positions.inv_freq, before)
    # What was lost before: radians at an ordinary length.
    assert (4096 * (before.bfloat16().float() - before)).abs().max() > 3


def test_a_small_llama_keeps_its_positions_and_trains():
    technique = PureBf16()
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64}
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2)
    ).train()
    before = llama.model.rotary_emb.inv_freq.clone()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-2)
    technique.model(llama)
    technique.optimizer(optimizer)
    tokens, losses = torch.arange(32)[None], []

    for _ in range(20):
        loss = llama(input_ids=tokens, labels=tokens).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert torch.equal(llama.model.rotary_emb.inv_freq, before)
    assert llama.model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert losses[-1] < losses[0] / 2


def test_steps_with_a_closure_are_told():
    technique = PureBf16()
    linear = nn.Linear(8, 4)
    technique.model(linear)
    optimizer = technique.optimizer(torch.optim.SGD(linear.parameters(), lr=0.1))

    def closure():
        loss = linear(torch.ones(2, 8)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)

    with pytest.raises(NotApplicable, match="closure"):
        technique.end()
    assert {p.dtype for p in linear.parameters()} == {torch.float32}
    assert linear.weight.grad.dtype == torch.float32
    assert not linear._forward_pre_hooks
    assert not linear._forward_hooks


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.LBFGS])
def test_a_model_that_is_called_in_a_closure_first_stays_in_fp32(kind):
    technique = PureBf16()
    linear = nn.Linear(8, 4)
    optimizer = kind(linear.parameters(), lr=0.1)
    technique.optimizer(optimizer)
    converted = []

    def closure():
        with contextlib.suppress(NotApplicable):
            converted.append(technique.model(linear))
        loss = linear(torch.ones(2, 8)).square().sum()
        optimizer.zero_grad()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)

    assert converted == []
    assert {p.dtype for p in linear.parameters()} == {torch.float32}


STEPPERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
}


def trained_step(net, stepper):
    net(torch.ones(2, 8)).square().sum().backward()
    stepper.step()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("make", STEPPERS.values(), ids=STEPPERS)
def test_an_optimizer_that_was_loaded_steps_in_fp32_too(make, is_late):
    technique = PureBf16()
    linear = nn.Linear(8, 4)
    first = make(linear.parameters())
    trained_step(linear, first)
    saved = copy.deepcopy(first.state_dict())
    loaded = make(linear.parameters())

    # Scripts load before the first call of the model; some only after it.
    if not is_late:
        loaded.load_state_dict(saved)
    technique.model(linear)
    if is_late:
        loaded.load_state_dict(saved)
    technique.optimizer(loaded)
    seen = []
    loaded.register_step_pre_hook(lambda *_: seen.append(linear.weight.dtype))
    trained_step(linear, loaded)

    assert seen == [torch.float32]
    assert linear.weight.dtype == torch.bfloat16
    states = [value for state in loaded.state.values() for value in state.values()]
    assert {value.dtype for value in states} == {torch.float32}


def test_a_group_that_joins_later_steps_in_fp32_too():
    technique = PureBf16()
    net = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    technique.model(net)
    stepper = technique.optimizer(torch.optim.AdamW(net[1].parameters()))
    trained_step(net, stepper)

    stepper.add_param_group({"params": list(net[0].parameters())})
    trained_step(net, stepper)

    assert stepper.state[net[0].weight]["exp_avg"].dtype == torch.float32
    assert net[0].weight.dtype == torch.bfloat16


def test_a_step_before_the_models_first_call_does_not_switch_it_off():
    technique = PureBf16()
    linear = nn.Linear(8, 4)
    stepper = technique.optimizer(torch.optim.AdamW(linear.parameters()))
    stepper.step()
    technique.model(linear)

    trained_step(linear, stepper)

    assert stepper.state[linear.weight]["exp_avg"].dtype == torch.float32
    assert linear.weight.dtype == torch.bfloat16
    assert not technique.end()


def test_where_no_model_was_converted_the_optimizer_is_no_sign_that_it_acted():
    technique = PureBf16()
    stepper = torch.optim.AdamW(nn.Linear(8, 4).parameters())
    technique.optimizer(stepper)
    with pytest.raises(NotApplicable, match="no training call"):
        technique.end()

    technique.model(nn.Linear(8, 4))

    with pytest.raises(NotApplicable, match="no parameter of the converted model"):
        technique.optimizer(stepper)


def test_a_model_that_the_script_lets_go_is_not_kept():
    """One of each fold; the next one is converted too."""
    technique, linear = PureBf16(), nn.Linear(8, 4)
    technique.model(linear)
    trained_step(linear, technique.optimizer(torch.optim.AdamW(linear.parameters())))
    alive = [weakref.ref(parameter) for parameter in linear.parameters()]

    del linear
    gc.collect()

    assert [each() for each in alive] == [None, None]
    assert not technique.end()


@pytest.mark.parametrize("is_first", [False, True])
def test_an_optimizer_that_becomes_another_one_steps_in_fp32_too(is_first):
    linear = nn.Linear(8, 4)
    lowering = PureBf16()
    lowering.model(linear)
    techniques = [lowering, Adafactor()] if is_first else [Adafactor(), lowering]
    stepper = torch.optim.AdamW(linear.parameters())
    in_first_step(stepper, lambda found: [technique.optimizer(found) for technique in techniques])

    for _ in range(3):
        trained_step(linear, stepper)

    assert type(stepper) is torch.optim.Adafactor
    assert stepper.state[linear.weight]["row_var"].dtype == torch.float32
    assert linear.weight.dtype == torch.bfloat16


def test_a_model_whose_optimizer_steps_in_backward_stays_as_it_is():
    linear = nn.Linear(8, 4)
    stepper = torch.optim.SGD(linear.parameters(), lr=0.1)
    undo = step_in_backward(stepper)

    with pytest.raises(NotApplicable, match="each parameter is updated in the backward pass"):
        PureBf16().model(linear)

    undo()
    assert linear.weight.dtype == torch.float32
    assert not linear._forward_hooks


def test_rounding_keeps_the_layout_of_the_weights():
    weight = torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last)

    assert round_stochastically(weight).stride() == weight.stride()


def test_a_model_of_another_precision_is_left_alone():
    with pytest.raises(NotApplicable, match="float64"):
        PureBf16().model(nn.Linear(2, 2).double())


def test_it_is_offered_where_bf16_is_fast():
    facts = profile(models=(model(parameter_bytes=400),), peak_bytes=PeakBytes(allocated=GIB))

    (found,) = PureBf16.candidates(facts, machine(cpu_features=FAST))

    effect = found.predict(facts, machine(cpu_features=FAST))
    assert effect.step_ms == pytest.approx(-100 * (1 - 1 / 2.0) + 1000 * 80 / 10e9 * 1e3)
    assert effect.peak_bytes == -200
    assert PureBf16.candidates(facts, machine()) == ()
    assert PureBf16().predict(facts, machine()).step_ms > 0


def test_its_step_costs_what_copies_and_rounding_of_each_parameter_take():
    host = machine(cpu_features=FAST)
    few, many = (
        PureBf16().predict(profile(models=(model(parameters=count),)), host).step_ms
        for count in (10_000, 100_000_000)
    )

    assert few < 0 < many


def test_no_more_memory_is_predicted_to_go_than_the_activations_take():
    known = {"parameters": 10_000_000, "parameter_bytes": 40_000_000}
    held = PeakBytes(allocated=170_000_000)
    facts = profile(models=(model(**known),), optimizers=(optimizer(),), peak_bytes=held)

    assert PureBf16().predict(facts, machine(cpu_features=FAST)).peak_bytes == -10_000_000


@pytest.mark.slow
def test_a_real_script_trains_in_it():
    # Of so many steps: in the few that fit into a time on a busy machine no loss has to fall.
    trial = played("naive_gpt.py --clip 1 --schedule", "pure_bf16", steps=20)

    assert [item.status for item in trial.applied] == ["applied"], trial.applied
    first, *others = trial.profile.losses
    assert len(others) >= 10
    assert sum(others[-10:]) / 10 < first
