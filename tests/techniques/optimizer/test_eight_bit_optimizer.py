import copy

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.optimizer import eight_bit_optimizer
from flatout.techniques.optimizer.eight_bit_optimizer import EightBitOptimizer, to_eight_bits
from tests.techniques.facts import FULL, GIB, gpu, machine, model, optimizer, profile
from tests.techniques.small_training import in_first_step

PROMISE = ("naive_gpt.py", {})

# Torchao's own: its kernels for GPUs, and a tensor class without a hash for the compiler's cache.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.optim")


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 4))


def train(module, stepper, steps=5):
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(steps):
        stepper.zero_grad()
        loss = module(x).square().mean()
        loss.backward()
        stepper.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.slow
def test_it_trains_nearly_as_adam_with_moments_of_eight_bits(torchao):
    plain, changed = network(), network()
    stepper = in_first_step(torch.optim.AdamW(changed.parameters(), lr=1e-3), to_eight_bits)

    found = train(changed, stepper)

    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    assert type(stepper) is torchao.AdamW8bit
    assert found == pytest.approx(expected, rel=0.02)
    assert stepper.state[changed[0].weight]["exp_avg"].codes.dtype == torch.uint8


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_its_state_goes_into_the_plain_optimizer_and_back():
    module, other = network(), network()
    stepper = in_first_step(torch.optim.AdamW(module.parameters(), lr=1e-3), to_eight_bits)
    train(module, stepper)
    other.load_state_dict(module.state_dict())
    plain = torch.optim.AdamW(other.parameters(), lr=1e-3)

    saved = copy.deepcopy(stepper.state_dict())
    plain.load_state_dict(saved)
    stepper.load_state_dict(copy.deepcopy(plain.state_dict()))

    moments = plain.state[other[0].weight]["exp_avg"]
    assert type(moments) is torch.Tensor
    assert moments.dtype == torch.float32
    assert isinstance(saved["param_groups"][0]["lr"], float)
    assert stepper.state[module[0].weight]["exp_avg"].codes.dtype == torch.uint8
    assert train(module, stepper) == pytest.approx(train(other, plain), rel=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("torchao")
def test_a_rate_that_the_loop_sets_as_a_number_is_taken():
    module = network()
    stepper = in_first_step(torch.optim.Adam(module.parameters(), lr=1e-3), to_eight_bits)
    train(module, stepper, steps=1)
    assert stepper.param_groups[0]["lr"] == 1e-3
    assert isinstance(stepper.param_groups[0]["lr"], float)  # a script may write it to a file
    weight = module[0].weight.detach().clone()

    stepper.param_groups[0]["lr"] = 0.0
    train(module, stepper, steps=1)

    assert torch.equal(module[0].weight, weight)


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(eight_bit_optimizer.importlib.util, "find_spec", lambda _: None)

    with pytest.raises(NotApplicable, match=r"pip install flatout\[lowbit\]"):
        EightBitOptimizer().optimizer(torch.optim.AdamW(network().parameters()))


@pytest.mark.usefixtures("torchao")
def test_a_model_of_small_tensors_has_nothing_to_pack():
    with pytest.raises(NotApplicable, match="no parameter has 4096 elements"):
        EightBitOptimizer().optimizer(torch.optim.AdamW(nn.Linear(8, 8).parameters()))


@pytest.mark.usefixtures("torchao")
def test_another_optimizer_is_left_alone():
    with pytest.raises(NotApplicable, match="takes the place of Adam"):
        EightBitOptimizer().optimizer(torch.optim.SGD(network().parameters(), lr=0.1))


def test_three_quarters_of_the_state_are_predicted_for_adam_where_memory_is_tight():
    host = machine(device=gpu())

    def facts(name):
        return profile(
            kind="cuda",
            peak_bytes=FULL,
            models=(model(parameter_bytes=10 * GIB),),
            optimizers=(optimizer(name=name),),
        )

    (found,) = EightBitOptimizer.candidates(facts("Adam"), host)

    effect = found.predict(facts("Adam"), host)
    assert effect.peak_bytes == pytest.approx(-0.74 * 20 * GIB, rel=1e-6)
    assert effect.step_ms > 0
    assert EightBitOptimizer.candidates(facts("SGD"), host) == ()
