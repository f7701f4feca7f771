from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from flatout.agent.measuring import attention
from flatout.agent.measuring.attention import backend_of
from flatout.kernels.module_proof import plain_computing
from flatout.records.errors import NotApplicable
from flatout.techniques.compile.torch_compile.compile_watch import CompileWatch
from flatout.techniques.compute import attention_backend
from flatout.techniques.compute.attention_backend import (
    COMPILED,
    AttentionBackend,
    noting,
    preferring,
    stop_preferring,
)
from tests.techniques.facts import gpu, machine, model, profile

PROMISE = "acts on a CUDA device only: several fused kernels"


@pytest.fixture(autouse=True)
def torch_s_own_order():
    before = order()
    yield
    torch._C._set_sdp_priority_order(before)


def running_on(backend):
    return profile(kind="cuda", models=(model(attention_backend=backend),))


def heads(length=16, **changes):
    return torch.randn(1, 2, length, 8, **changes)


def test_the_backend_that_torch_takes_is_named_and_of_math_the_reason():
    x = heads()

    assert backend_of(x, x, x, is_causal=True) == ("flash", "")
    assert backend_of(x, x, x, None, 0.1)[0] == "math"
    assert "drops weights" in backend_of(x, x, x, None, 0.1)[1]
    assert "3 dimensions" in backend_of(x[0], x[0], x[0])[1]


def test_torch_s_operator_is_told_the_same():
    """What is named is what runs: the fused kernel's own operator is in the graph."""
    x = heads(requires_grad=True)

    fused = functional.scaled_dot_product_attention(x, x, x)
    with_mask = functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    assert "Flash" in type(fused.grad_fn).__name__
    assert "Flash" not in type(with_mask.grad_fn).__name__


def test_a_preferred_kernel_gives_the_same_and_what_ran_is_told():
    x = heads()
    operation = functional.scaled_dot_product_attention

    technique = AttentionBackend(backend="flash")
    call = preferring(
        "flash",
        noting(lambda: functional.scaled_dot_product_attention(x, x, x), technique.seen),
        [],
    )

    assert torch.equal(call(), operation(x, x, x))
    assert functional.scaled_dot_product_attention is operation
    assert technique.end() == "attention ran on flash"
    call()
    with pytest.raises(NotApplicable, match="never called"):
        technique.end()


def order():
    return torch._C._get_sdp_priority_order()


def test_a_preference_holds_in_backward_too_and_ends_with_the_training():
    """Checkpointed blocks run again in backward, outside of the training call."""
    before, orders, technique = order(), [], AttentionBackend()
    technique.seen.append(("cudnn", ""))

    def block(x):
        orders.append(order())
        return functional.scaled_dot_product_attention(x, x, x)

    call = preferring("cudnn", lambda x: checkpoint(block, x, use_reentrant=False), technique.order)
    assert order() == before
    for _ in range(2):
        call(heads(requires_grad=True)).sum().backward()

    cudnn = int(SDPBackend.CUDNN_ATTENTION)
    assert orders == [[cudnn, *(kind for kind in before if kind != cudnn)]] * 4
    assert technique.end() == "attention ran on cudnn"
    assert order() == before


def test_the_last_of_two_preferences_holds_and_both_end():
    before, own = order(), []

    preferring("cudnn", list, own)()
    preferring("efficient", list, own)()

    assert order()[0] == int(SDPBackend.EFFICIENT_ATTENTION)
    stop_preferring(own)
    assert order() == before


def test_kernels_that_the_script_switched_off_stay_off():
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        is_on = preferring("flash", torch.backends.cuda.mem_efficient_sdp_enabled, [])()
        with pytest.raises(NotApplicable, match="attention on cudnn is switched off"):
            preferring("cudnn", list, [])

    assert not is_on


def test_a_kernel_that_did_not_run_is_told():
    technique = AttentionBackend()
    technique.seen.append(("math", "an odd head"))

    with pytest.raises(NotApplicable, match="ran on math all the same: an odd head"):
        technique.end()


class OnGpu(nn.Module):
    """Says that it lies on a GPU."""

    def parameters(self, *_, **__):
        yield SimpleNamespace(is_cuda=True)

    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x, x)


def test_compiled_attention_is_not_looked_at_and_so_compiled_once():
    torch._dynamo.reset()
    net, technique = OnGpu(), AttentionBackend(backend="flash")
    net.compile(backend="eager")
    watch = CompileWatch().begin()

    call = technique.forward(net, net)
    for _ in range(3):
        call(heads())

    assert watch.report() == "1 regions compiled, 0 of them again"
    assert technique.end() == COMPILED


def test_what_the_training_s_attention_ran_on_is_told_not_that_of_a_comparison(monkeypatch):
    asked = []

    def backend_of(query, *_, **__):
        asked.append(query.dtype)
        return ("math", "no") if query.dtype == torch.float64 else ("flash", "")

    monkeypatch.setattr(attention, "backend_of", backend_of)
    x = heads()

    def training():
        with plain_computing():
            functional.scaled_dot_product_attention(x.double(), x.double(), x.double())
        return functional.scaled_dot_product_attention(x, x, x)

    technique = AttentionBackend(backend="flash")
    noting(training, technique.seen)()

    assert asked == [torch.float32]
    assert technique.end() == "attention ran on flash"


def test_on_a_cpu_there_is_nothing_to_choose():
    network = nn.Linear(2, 2)

    with pytest.raises(NotApplicable, match="one fused kernel"):
        AttentionBackend().forward(network, network)


def test_cudnn_is_tried_on_hopper_and_flash_where_the_efficient_kernel_ran():
    hopper, ampere = machine(device=gpu((9, 0))), machine(device=gpu((8, 0)))

    assert AttentionBackend.candidates(running_on("flash"), hopper) == [AttentionBackend()]
    assert AttentionBackend.candidates(running_on("efficient"), ampere) == [
        AttentionBackend(backend="flash")
    ]
    assert AttentionBackend().predict(running_on("flash"), hopper).step_ms == pytest.approx(-3.0)


@pytest.mark.parametrize("facts", [running_on("math"), running_on(""), profile()])
def test_it_is_not_offered_where_a_preference_changes_nothing(facts):
    assert AttentionBackend.candidates(facts, machine(device=gpu((9, 0)))) == ()


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return functional.scaled_dot_product_attention(x, x * self.scale, x, is_causal=True)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch says why each of the other kernels was not taken
@pytest.mark.parametrize("backend", ["flash", "efficient", "cudnn"])
def test_a_gpu_runs_the_kernel_that_was_asked_for_and_gives_the_same(backend):
    if backend == "cudnn" and torch.cuda.get_device_capability() < attention_backend.HOPPER:
        pytest.skip("the technique asks for cuDNN's kernel from Hopper on")
    root = Attends().to("cuda", torch.bfloat16)
    x = torch.randn(2, 4, 128, 64, device="cuda", dtype=torch.bfloat16)
    technique = AttentionBackend(backend=backend)
    with sdpa_kernel(SDPBackend.MATH):
        expected = root(x)

    found = technique.forward(root, root)(x)

    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert technique.end() == f"attention ran on {backend}"
