import copy

import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.readings import Limits
from flatout.techniques.memory.activation_offload import ActivationOffload, offloaded
from tests.techniques.facts import FULL, GIB, gpu, machine, model, profile

PROMISE = "acts on a CUDA device only: memory of a device"


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))


def gradients(module, call, memory_format=torch.contiguous_format):
    x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    call(x.to(memory_format=memory_format)).square().mean().backward()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_gradients_are_bit_identical_whatever_the_layout(layout):
    plain = network().to(memory_format=layout)
    moved = copy.deepcopy(plain)

    found = gradients(moved, offloaded(moved, moved, min_bytes=0), layout)

    expected = gradients(plain, plain, layout)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_large_activations_are_copied_and_parameters_and_small_ones_are_not(monkeypatch):
    linear = nn.Linear(64, 64)
    copied = []
    plain = torch.empty_like

    def noted(tensor, **options):
        if "pin_memory" in options:
            copied.append(tuple(tensor.shape))
        return plain(tensor, **options)

    monkeypatch.setattr(torch, "empty_like", noted)
    call = offloaded(lambda x: torch.tanh(torch.tanh(linear(x))[:1]), linear, min_bytes=1024)

    call(torch.randn(32, 64)).sum().backward()

    assert copied == [(32, 64), (32, 64)]


def test_on_the_cpu_there_is_nowhere_to_go():
    module = network()

    with pytest.raises(NotApplicable, match="in host memory"):
        ActivationOffload().forward(module, module)


def test_two_copies_at_the_measured_rate_are_predicted():
    host = machine(device=gpu(), memory_bytes=512 * GIB)
    facts = profile(
        kind="cuda",
        peak_bytes=FULL,
        models=(model(parameter_bytes=5 * GIB),),
        limits=Limits(copy_bytes_per_s=float(48 * GIB)),
    )

    (found,) = ActivationOffload.candidates(facts, host)

    # 70 GiB less parameters and gradients are 60 activations, of which four fifths move.
    assert found.predict(facts, host).step_ms == pytest.approx(2000.0)
    assert found.predict(facts, host).peak_bytes == pytest.approx(-48 * GIB, rel=1e-6)


def test_it_is_not_offered_on_the_cpu_nor_where_there_is_room():
    assert ActivationOffload.candidates(profile(peak_bytes=FULL), machine()) == ()
    assert ActivationOffload.candidates(profile(kind="cuda"), machine(device=gpu())) == ()


@pytest.mark.gpu
def test_device_memory_between_forward_and_backward_is_lower_on_a_gpu():
    held = []
    for wrap in (lambda call, _: call, offloaded):
        module = nn.Sequential(nn.Linear(64, 4096), *(nn.Sigmoid() for _ in range(8))).cuda()
        output = wrap(module, module)(torch.randn(4096, 64, device="cuda"))
        held.append(torch.cuda.memory_allocated())
        output.sum().backward()
        del output, module

    assert held[1] < held[0] / 2
