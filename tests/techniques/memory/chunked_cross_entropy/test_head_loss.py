"""The last layer and the loss as one, without the table of logits."""

import pytest
import torch
import torch.nn.functional as F

from flatout.techniques.memory import chunked_cross_entropy as technique
from flatout.techniques.memory.chunked_cross_entropy import head_cross_entropy
from tests.techniques.peaks import peak_bytes


def head(rows=96, width=16, classes=2048, bias=True):  # noqa: FBT002  as torch's layer has it
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).requires_grad_()
    offset = torch.randn(classes, generator=generator).requires_grad_() if bias else None
    target = torch.randint(classes, (rows,), generator=generator)
    target[::5] = -100
    return hidden, weight, offset, target


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("bias", [True, False])
def test_layer_and_loss_as_one_match_torch_up_to_rounding(reduction, bias):
    hidden, weight, offset, target = head(bias=bias)
    leaves = [x for x in (hidden, weight, offset) if x is not None]
    found = head_cross_entropy(hidden, weight, target, offset, reduction=reduction)
    expected = F.cross_entropy(F.linear(hidden, weight, offset), target, reduction=reduction)

    ours = torch.autograd.grad(found, leaves)
    theirs = torch.autograd.grad(expected, leaves)

    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_layer_and_loss_as_one_are_as_near_to_the_truth_under_autocast():
    hidden, weight, offset, target = head()
    leaves = hidden, weight, offset
    exact = F.cross_entropy(F.linear(*(x.double() for x in leaves)), target)
    truth = torch.autograd.grad(exact, leaves)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = head_cross_entropy(hidden, weight, target, offset)
        plain = F.cross_entropy(F.linear(*leaves), target)

    assert loss.dtype == plain.dtype == torch.float32
    ours, theirs = torch.autograd.grad(loss, leaves), torch.autograd.grad(plain, leaves)
    for one, other, right in zip(ours, theirs, truth, strict=True):
        assert torch.dist(one, right) <= 1.5 * torch.dist(other, right) + 1e-6


def test_layer_and_loss_as_one_hold_a_part_of_the_logits(monkeypatch):
    monkeypatch.setattr(technique, "SLICE_BYTES", 2**18)  # small alongside this small table, too
    hidden, weight, offset, target = head(rows=1024, width=32, classes=8192)

    def step():
        head_cross_entropy(hidden, weight, target, offset).backward()

    step()
    assert peak_bytes(step) < 0.6 * 4 * 1024 * 8192


def test_layer_and_loss_as_one_go_backward_twice_where_torch_would():
    hidden, weight, offset, target = head()
    loss = head_cross_entropy(hidden, weight, target, offset)
    loss.backward(retain_graph=True)
    once = weight.grad.clone()

    loss.backward()

    torch.testing.assert_close(weight.grad, 2 * once)
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_layer_and_loss_as_one_refuse_what_torch_refuses_and_fp16():
    hidden, weight, offset, target = head()
    (gradient,) = torch.autograd.grad(
        head_cross_entropy(hidden, weight, target, offset), weight, create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()

    target[3] = 2048
    with pytest.raises(IndexError, match="Target 2048 is out of bounds"):
        head_cross_entropy(hidden, weight, target, offset)
    with pytest.raises(ValueError, match="would be fp16"):
        head_cross_entropy(hidden.half(), weight.half(), target)


def test_layer_and_loss_as_one_without_any_target_are_nan_with_gradients_of_zero():
    hidden, weight, offset, target = head()
    loss = head_cross_entropy(hidden, weight, torch.full_like(target, -100), offset)

    loss.backward()

    assert loss.isnan()
    assert not weight.grad.any()
