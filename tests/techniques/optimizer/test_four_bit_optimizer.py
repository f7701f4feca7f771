import copy

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.profile import PeakBytes
from flatout.techniques.optimizer.four_bit_optimizer import FourBitOptimizer, to_four_bits
from tests.techniques.facts import GIB, gpu, machine, model, optimizer, profile
from tests.techniques.optimizer.test_adafactor import in_first_step
from tests.techniques.optimizer.test_eight_bit_optimizer import network, train

PROMISE = ("naive_gpt.py", {})

FULL = PeakBytes(allocated=70 * GIB, reserved=75 * GIB, device=76 * GIB)
# Torchao's own: its kernels for GPUs, and a tensor class without a hash for the compiler's cache.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao.optim")


@pytest.mark.slow
def test_it_trains_nearly_as_adam_and_its_state_goes_into_the_plain_optimizer_and_back(torchao):
    plain, changed, other = network(), network(), network()
    stepper = in_first_step(torch.optim.AdamW(changed.parameters(), lr=1e-3), to_four_bits)

    found = train(changed, stepper)
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-3))
    saved = copy.deepcopy(stepper.state_dict())
    other.load_state_dict(changed.state_dict())
    plainly = torch.optim.AdamW(other.parameters(), lr=1e-3)
    plainly.load_state_dict(saved)
    stepper.load_state_dict(copy.deepcopy(plainly.state_dict()))

    packed = stepper.state[changed[0].weight]["exp_avg"]
    assert type(stepper) is torchao.AdamW4bit
    assert found == pytest.approx(expected, rel=0.2)
    assert packed.codes.numel() == changed[0].weight.numel() // 2  # two of them in a byte
    assert plainly.state[other[0].weight]["exp_avg"].dtype == torch.float32
    assert train(changed, stepper) == pytest.approx(train(other, plainly), rel=0.2)


@pytest.mark.usefixtures("torchao")
def test_a_model_of_small_tensors_has_nothing_to_pack():
    with pytest.raises(NotApplicable, match="4096 elements in whole blocks of 128"):
        FourBitOptimizer().optimizer(torch.optim.AdamW(nn.Linear(8, 8).parameters()))


@pytest.mark.usefixtures("torchao")
def test_another_optimizer_is_left_alone():
    with pytest.raises(NotApplicable, match="takes the place of Adam"):
        FourBitOptimizer().optimizer(torch.optim.SGD(network().parameters(), lr=0.1))


def test_most_of_the_state_is_predicted_for_adam_where_memory_is_tight():
    host = machine(device=gpu())

    def facts(name, **changes):
        return profile(
            kind="cuda",
            models=(model(parameter_bytes=10 * GIB),),
            optimizers=(optimizer(name=name),),
            **changes,
        )

    (found,) = FourBitOptimizer.candidates(facts("AdamW", peak_bytes=FULL), host)

    effect = found.predict(facts("AdamW"), host)
    assert effect.peak_bytes == pytest.approx(-0.86 * 20 * GIB, rel=1e-6)
    assert FourBitOptimizer.candidates(facts("SGD", peak_bytes=FULL), host) == ()
    assert FourBitOptimizer.candidates(facts("AdamW"), host) == ()
