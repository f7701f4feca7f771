import pytest
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.memory import MemoryStory
from flatout.records.profile import PeakBytes
from flatout.techniques.memory import expandable_segments
from flatout.techniques.memory.expandable_segments import ExpandableSegments, with_setting
from tests.support.programs import python
from tests.techniques.facts import GIB, gpu, machine, profile

PROMISE = "acts on a CUDA device only: the caching allocator"

FULL = PeakBytes(allocated=60 * GIB, reserved=75 * GIB, device=75 * GIB)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", "expandable_segments:True"),
        ("expandable_segments:False", "expandable_segments:True"),
        ("max_split_size_mb:64", "max_split_size_mb:64,expandable_segments:True"),
    ],
)
def test_what_was_configured_is_kept(before, after):
    assert with_setting(before) == after


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_both_names_are_set_and_what_either_held_is_kept(name):
    found = ExpandableSegments().environment({"PATH": "/bin", name: "a:1"})

    assert found == {
        "PATH": "/bin",
        "PYTORCH_ALLOC_CONF": "a:1,expandable_segments:True",
        "PYTORCH_CUDA_ALLOC_CONF": "a:1,expandable_segments:True",
    }


class OnDevice(nn.Linear):
    """A model whose parameters say that they are on a GPU."""

    def parameters(self):
        return iter([type("Parameter", (), {"is_cuda": True})()])


def test_an_allocator_that_took_it_is_believed(monkeypatch):
    monkeypatch.setattr(
        expandable_segments, "allocator_settings", lambda: {"expandable_segments": True}
    )
    model = OnDevice(2, 2)

    assert ExpandableSegments().model(model) is model


@pytest.mark.parametrize("answer", [{}, {"expandable_segments": False}])
def test_an_allocator_that_did_not_take_it_fails_the_technique(monkeypatch, answer):
    monkeypatch.setattr(expandable_segments, "allocator_settings", lambda: answer)

    with pytest.raises(RuntimeError, match="the allocator says expandable_segments=False"):
        ExpandableSegments().model(OnDevice(2, 2))


def test_a_model_on_the_cpu_has_no_segments():
    with pytest.raises(NotApplicable, match="not on a CUDA device"):
        ExpandableSegments().model(nn.Linear(2, 2))


def test_what_is_fragmented_is_predicted_to_come_back():
    host = machine(device=gpu())
    story = MemoryStory(
        peak_bytes=0, peak_phase="", by_phase={}, by_module={}, fragmentation_share=0.2
    )

    (found,) = ExpandableSegments.candidates(profile(kind="cuda", peak_bytes=FULL), host)

    known = profile(kind="cuda", peak_bytes=FULL, memory=story)
    assert found.predict(known, host).peak_bytes == -15 * GIB
    assert found.predict(known, host).step_ms == 0.0


def test_it_is_offered_for_cuda_alone_where_memory_is_tight():
    host = machine(device=gpu())

    assert ExpandableSegments.candidates(profile(peak_bytes=FULL), machine()) == ()
    assert ExpandableSegments.candidates(profile(kind="cuda"), host) == ()


@pytest.mark.gpu
def test_the_allocator_of_a_real_process_says_that_it_is_on():
    import os

    code = (
        "import torch; torch.zeros(1, device='cuda');"
        "from flatout.techniques.memory.expandable_segments import *;"
        "print(find_setting(allocator_settings()))"
    )
    environment = dict(ExpandableSegments().environment(dict(os.environ)))

    done = python(["-c", code], env=environment, check=True)

    assert done.stdout.split()[-1] == "True"
