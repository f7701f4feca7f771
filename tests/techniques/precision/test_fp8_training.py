"""Which layers become fp8 ones, and where that is refused. Its speed needs a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.precision.fp8_training import Fp8Training, eligible_layers, padded, to_fp8
from tests.techniques.facts import gpu, machine, model, profile

PROMISE = "acts on a CUDA device only: products in fp8"

pytestmark = pytest.mark.filterwarnings("ignore")


def network():
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 50), nn.Linear(50, 64), nn.Linear(64, 64))


def test_layers_of_sixteenths_are_eligible_but_not_the_last():
    assert eligible_layers(network()) == {"0"}


def test_eligible_layers_become_fp8_ones_with_their_own_weights():
    pytest.importorskip("torchao.float8")
    plain = network()
    weights = [layer.weight for layer in plain]

    to_fp8(plain)

    assert [type(layer).__name__ for layer in plain] == ["Float8Linear", *["Linear"] * 3]
    assert all(a.data_ptr() == b.weight.data_ptr() for a, b in zip(weights, plain, strict=True))


@pytest.mark.parametrize("scaling", ["tensorwise", "rowwise"])
def test_any_number_of_rows_fits_the_products_for_a_weight_s_gradient(scaling):
    pytest.importorskip("torchao.float8")

    layer = to_fp8(network(), scaling)[0]

    assert layer.config.pad_inner_dim


def test_a_torchao_that_knows_no_padding_is_asked_for_none():
    config = SimpleNamespace(emulate=False)

    assert padded(config) is config


def test_a_model_without_such_layers_is_left_alone():
    with pytest.raises(NotApplicable, match="multiple of 16"):
        to_fp8(nn.Sequential(nn.Linear(10, 10), nn.Linear(16, 16)))


def test_the_cpu_is_refused():
    with pytest.raises(NotApplicable, match="CUDA device"):
        Fp8Training().model(network())


def test_it_is_offered_to_billions_of_parameters_on_hopper():
    large = profile(kind="cuda", models=(model(parameters=3_000_000_000),))
    small = replace(large, models=(model(),))
    hopper, ampere = machine(device=gpu((9, 0))), machine(device=gpu((8, 0)))

    (found,) = Fp8Training.candidates(large, hopper)

    assert found.predict(large, hopper).step_ms == pytest.approx(-20.0)
    assert Fp8Training.candidates(small, hopper) == ()
    assert Fp8Training.candidates(large, ampere) == ()
    on_cpu = replace(large, device_kind="cpu")
    for facts, host in ((small, hopper), (large, ampere), (on_cpu, hopper)):
        assert Fp8Training().predict(facts, host).step_ms == 0.0


@pytest.mark.gpu
def test_a_compiled_fp8_model_trains_on_a_gpu():
    pytest.importorskip("torchao.float8")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no units for fp8")
    net = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda().bfloat16()

    trained = Fp8Training().model(net)
    trained(torch.randn(32, 64, device="cuda", dtype=torch.bfloat16)).sum().backward()

    assert all(p.grad is not None for p in trained.parameters())
