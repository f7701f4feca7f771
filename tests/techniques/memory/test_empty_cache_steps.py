import pytest
import torch
from torch import nn

from flatout.records.errors import NotApplicable
from flatout.records.memory import MemoryStory
from flatout.records.profile import PeakBytes
from flatout.techniques.memory.empty_cache_steps import EmptyCacheSteps, flush_every
from tests.techniques.facts import GIB, gpu, machine, profile

PROMISE = "acts on a CUDA device only: the caching allocator"

PEAK = PeakBytes(allocated=60 * GIB, reserved=70 * GIB, device=71 * GIB)


def story(**changes):
    return MemoryStory(peak_bytes=0, peak_phase="", by_phase={}, by_module={}, **changes)


def stepper():
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


def test_the_cache_is_flushed_after_every_nth_step_until_it_is_undone():
    flushed = []
    optimizer = stepper()
    made = []
    undo = flush_every(optimizer, 3, lambda: flushed.append(len(made)))

    for number in range(1, 8):
        made.append(number)
        optimizer.step()
    undo()
    for _ in range(3):
        optimizer.step()

    assert flushed == [3, 6]


def test_the_cpu_has_no_cache():
    with pytest.raises(NotApplicable, match="keeps no cache"):
        EmptyCacheSteps().optimizer(stepper())


def test_it_costs_time_and_brings_back_what_is_unused():
    host = machine(device=gpu())
    facts = profile(kind="cuda", peak_bytes=PEAK, memory=story(fragmentation_share=0.2))

    (found,) = EmptyCacheSteps.candidates(facts, host)

    effect = found.predict(facts, host)
    assert effect.step_ms == pytest.approx(0.01 * facts.step_ms.median)
    assert effect.peak_bytes == pytest.approx(-0.2 * 71 * GIB, abs=1)


@pytest.mark.parametrize(
    ("kind", "memory"),
    [
        ("cpu", story(allocation_retries=3)),
        ("cuda", None),
        ("cuda", story(fragmentation_share=0.05, allocation_retries=0)),
    ],
)
def test_it_is_never_offered_without_flushes_or_holes(kind, memory):
    facts = profile(kind=kind, peak_bytes=PEAK, memory=memory)

    assert EmptyCacheSteps.candidates(facts, machine(device=gpu())) == ()


def test_holes_in_a_device_that_is_half_empty_are_left_alone():
    roomy = PeakBytes(allocated=20 * GIB, reserved=40 * GIB, device=41 * GIB)
    facts = profile(kind="cuda", peak_bytes=roomy, memory=story(fragmentation_share=0.5))

    assert EmptyCacheSteps.candidates(facts, machine(device=gpu())) == ()
