import copy
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.precision.bf16_autocast import Bf16Autocast, autocast_bf16
from tests.techniques.facts import CPU, gpu, machine, model, profile
from tests.techniques.small_training import network

PROMISE = ("naive_gpt.py", {})

FAST = frozenset({"avx512_bf16"})
Pair = namedtuple("Pair", "logits state")


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


def gradients(network, call):
    x = torch.randn(32, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(32) % 4
    nn.functional.cross_entropy(call(x), labels).backward()
    return [p.grad for p in network.parameters()]


def test_gradients_are_fp32_and_close_to_those_of_fp32():
    plain = network()
    lowered = copy.deepcopy(plain)

    expected = gradients(plain, plain)
    found = gradients(lowered, Bf16Autocast().forward(lowered, lowered))

    assert all(g.dtype == torch.float32 for g in found)
    assert all(torch.dist(g, e) < 0.03 * e.norm() for g, e in zip(found, expected, strict=True))
    assert any(not torch.equal(g, e) for g, e in zip(found, expected, strict=True))


def test_products_are_computed_in_bf16_and_given_back_in_fp32():
    network = nn.Linear(8, 4)
    seen = []
    network.register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))

    output = autocast_bf16(network, "cpu")(torch.randn(2, 8))

    assert seen == [torch.bfloat16]
    assert output.dtype == torch.float32


@pytest.mark.parametrize(
    "wrap",
    [
        lambda t: {"logits": t, "n": 3},
        lambda t: Pair(t, [t]),
        lambda t: (t, None),
        lambda t: Output(loss=t.sum(), logits=t),
        lambda t: nn.utils.rnn.pack_sequence([t]),
    ],
)
def test_outputs_keep_their_structure(wrap):
    linear = nn.Linear(8, 4)

    output = autocast_bf16(lambda x: wrap(linear(x)), "cpu")(torch.randn(2, 8))

    expected = wrap(linear(torch.randn(2, 8)))
    assert type(output) is type(expected)
    assert "bfloat16" not in repr(output)


def test_outputs_of_hugging_face_models_keep_their_structure():
    outputs = pytest.importorskip("transformers.modeling_outputs")
    linear = nn.Linear(8, 4)

    def call(x):
        return outputs.CausalLMOutput(logits=linear(x), hidden_states=(x, linear(x)))

    found = autocast_bf16(call, "cpu")(torch.randn(2, 8))

    assert type(found) is outputs.CausalLMOutput
    assert found.logits.dtype == found["logits"].dtype == torch.float32
    assert found.hidden_states[1].dtype == torch.float32
    assert found.loss is None


@pytest.mark.parametrize(
    ("network", "reason"),
    [
        (nn.ReLU(), "no floating-point parameters"),
        (nn.Linear(2, 2).bfloat16(), r"torch\.bfloat16"),
        (nn.Linear(2, 2).half(), r"torch\.float16"),
        (nn.Linear(2, 2).double(), r"torch\.float64"),
    ],
)
def test_a_model_of_another_precision_is_left_alone(network, reason):
    with pytest.raises(NotApplicable, match=reason):
        Bf16Autocast().forward(network, network)


def test_a_script_with_autocast_of_its_own_is_left_alone():
    network = nn.Linear(2, 2)

    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(NotApplicable, match="under autocast itself"),
    ):
        Bf16Autocast().forward(network, network)


def test_a_model_that_accelerate_prepared_for_mixed_precision_is_left_alone():
    network = nn.Linear(2, 2)
    network._original_forward = network.forward

    with pytest.raises(NotApplicable, match="Accelerate"):
        Bf16Autocast().forward(network, network)


def test_half_of_forward_and_backward_is_predicted_on_a_cpu_with_fast_bf16():
    facts = profile(phases_ms={"optimizer": 100.0}, models=(model(),))

    (found,) = Bf16Autocast.candidates(facts, machine(cpu_features=FAST))

    assert found.predict(facts, machine(cpu_features=FAST)).step_ms == pytest.approx(-50.0)


@pytest.mark.parametrize(
    ("kind", "host"),
    [
        ("cpu", machine()),
        ("cpu", machine(cpu_features=frozenset({"avx2"}))),
        ("cuda", machine(device=gpu((7, 5)), cpu_features=FAST)),
    ],
)
def test_it_is_not_offered_where_bf16_is_emulated(kind, host):
    assert Bf16Autocast.candidates(profile(kind=kind, models=(model(),)), host) == ()


@pytest.mark.parametrize(
    ("kind", "device", "features", "sign"),
    [
        ("cpu", CPU, {"avx2", "avx512f"}, 1),
        ("cpu", CPU, {"avx512_bf16"}, -1),
        ("cpu", CPU, {"bf16"}, -1),
        ("cuda", gpu((7, 5)), {"amx_bf16"}, 0),
        ("cuda", gpu((8, 0)), {}, -1),
    ],
)
def test_a_gain_is_predicted_only_where_the_device_multiplies_bf16(kind, device, features, sign):
    host = machine(device=device, cpu_features=frozenset(features))

    step_ms = Bf16Autocast().predict(profile(kind=kind, models=(model(),)), host).step_ms

    assert (step_ms > 0) - (step_ms < 0) == sign


@pytest.mark.parametrize(
    "facts", [model(used_autocast=True), model(dtypes=("bfloat16",)), model(dtypes=("float64",))]
)
def test_it_is_not_offered_to_models_of_another_precision(facts):
    known = profile(models=(facts,))

    assert Bf16Autocast.candidates(known, machine(cpu_features=FAST)) == ()


@pytest.mark.gpu
def test_it_lowers_the_precision_on_a_gpu():
    lowered = network().cuda()
    seen = []
    lowered[0].register_forward_hook(lambda _m, _i, output: seen.append(output.dtype))

    output = Bf16Autocast().forward(lowered, lowered)(torch.randn(2, 8, device="cuda"))

    assert seen == [torch.bfloat16]
    assert output.dtype == torch.float32
