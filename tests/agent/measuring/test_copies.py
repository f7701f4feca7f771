import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from flatout.agent.measuring.operators import COPYING, FROM_DEVICE, TO_DEVICE, CopyTimer


@pytest.fixture
def seen(monkeypatch):
    """Time copies for the length of one test; `meta` stands for the device."""
    for name in (*COPYING, "copy_"):
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    copies = []
    CopyTimer(
        lambda way, began, ended, source: copies.append((way, ended > began, source))
    ).install()
    return copies


def test_a_copy_to_the_device_is_seen_with_its_tensor(seen):
    batch = torch.ones(3, 4)

    batch.to("meta")

    assert [(way, took, source is batch) for way, took, source in seen] == [(TO_DEVICE, True, True)]


def test_filling_a_tensor_on_the_device_is_a_copy(seen):
    torch.empty(3, device="meta").copy_(other=torch.ones(3))

    assert [way for way, _, _ in seen] == [TO_DEVICE]


def test_a_new_type_on_the_same_device_is_no_copy(seen):
    torch.ones(3).to(torch.float64).copy_(torch.zeros(3))
    torch.empty(3, device="meta").to("meta")

    assert seen == []


def test_a_copy_from_the_device_waits_for_it(seen):
    with FakeTensorMode():  # tensors that say they are on a device there may not be
        loss = torch.empty(3, device="cuda")

        loss.cpu()
        torch.empty(3).copy_(loss)

    assert [way for way, _, _ in seen] == [FROM_DEVICE, FROM_DEVICE]


def test_a_compiled_model_that_copies_has_no_graph_break(seen):
    def computed(x, y):
        y.copy_(x)
        return x.to(torch.float64).cpu().sum() + y.sum()

    compiled = torch.compile(computed, backend="eager", fullgraph=True)

    assert compiled(torch.ones(3), torch.zeros(3)) == 6.0
    assert seen == []
