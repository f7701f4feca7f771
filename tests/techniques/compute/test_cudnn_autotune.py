import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.techniques.compute.cudnn_autotune import CudnnAutotune
from tests.techniques.facts import gpu, machine, model, profile

PROMISE = "acts on a CUDA device only: cuDNN"


@pytest.mark.parametrize(
    ("root", "reason"),
    [(nn.Linear(2, 2), "no convolutions"), (nn.Conv2d(1, 1, 1), "only used on CUDA")],
)
def test_a_model_that_cannot_gain_is_left_alone(root, reason):
    with pytest.raises(NotApplicable, match=reason):
        CudnnAutotune().model(root)


def test_it_is_offered_to_convolutions_of_few_shapes_on_an_nvidia_gpu():
    facts = profile(kind="cuda", models=(model(conv_weights=20, input_shapes=4),))

    (found,) = CudnnAutotune.candidates(facts, machine(device=gpu()))

    effect = found.predict(facts, machine(device=gpu()))
    assert effect.step_ms == pytest.approx(-100 * (1 - 1 / 1.1))
    assert effect.startup_s > 0


@pytest.mark.parametrize(
    ("kind", "facts", "device"),
    [
        ("cpu", model(conv_weights=20), gpu()),
        ("cuda", model(), gpu()),
        ("cuda", model(conv_weights=20, input_shapes=5), gpu()),
        ("cuda", model(conv_weights=20), gpu(kind="rocm")),
    ],
)
def test_it_is_not_offered_where_it_cannot_matter(kind, facts, device):
    known = profile(kind=kind, models=(facts,))

    assert CudnnAutotune.candidates(known, machine(device=device)) == ()


@pytest.mark.gpu
def test_it_is_switched_on_for_a_model_on_a_gpu_unless_determinism_is_asked_for(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    root = nn.Conv2d(1, 1, 1).cuda()

    CudnnAutotune().model(root)

    assert torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    with pytest.raises(NotApplicable, match="deterministic"):
        CudnnAutotune().model(root)
