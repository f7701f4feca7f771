import pytest
import torch
from torch.utils.data import DataLoader

from flatout.records.errors import NotApplicable
from flatout.techniques.data.pinned_memory import PinnedMemory
from tests.techniques.data.samples import Numbers
from tests.techniques.facts import gpu, loader, machine, profile

PROMISE = "acts on a CUDA device only: copies to a device"


def copying(kind="cuda", h2d_ms=20.0, **facts):
    return profile(kind=kind, phases_ms={"h2d": h2d_ms}, loaders=(loader(**facts),))


def test_it_is_offered_where_a_gpu_waits_for_copies():
    (found,) = PinnedMemory.candidates(copying(), machine(device=gpu()))

    assert found.predict(copying(), machine(device=gpu())).step_ms == pytest.approx(-10.0)


@pytest.mark.parametrize(
    "facts", [copying(kind="cpu"), copying(h2d_ms=1.0), copying(pin_memory=True), profile()]
)
def test_it_is_not_offered_where_it_cannot_matter(facts):
    assert PinnedMemory.candidates(facts, machine(device=gpu())) == ()


def test_what_the_script_asked_for_stays():
    with pytest.raises(NotApplicable, match="itself"):
        PinnedMemory().loader({"dataset": Numbers(), "pin_memory": True})


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at a machine without a GPU")
def test_without_a_gpu_there_is_nothing_to_do():
    with pytest.raises(NotApplicable, match="there is none"):
        PinnedMemory().loader({"dataset": Numbers()})


@pytest.mark.gpu
def test_batches_are_pinned_and_equal():
    asked = {"dataset": Numbers(), "batch_size": 5}

    pinned = list(DataLoader(**PinnedMemory().loader(asked)))

    assert all(batch.is_pinned() for batch in pinned)
    assert [b.tolist() for b in pinned] == [b.tolist() for b in DataLoader(**asked)]
