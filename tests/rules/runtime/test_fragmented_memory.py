import pytest

from flatout.records.units import GIB
from flatout.rules.runtime.fragmented_memory import check
from tests.rules.memory_facts import story
from tests.techniques.facts import gpu, machine, profile


def holding(reserved_gib, **changes):
    memory = story(reserved_bytes=reserved_gib * GIB, **changes)
    return profile(kind="cuda", memory=memory)


def test_unused_memory_on_a_full_device_is_reported():
    finding = check(holding(72, fragmentation_share=0.25), machine(device=gpu()))

    assert finding.of == "device"
    assert finding.share == pytest.approx(18 / 80)
    assert finding.because == (
        "the allocator holds 72.00 GiB of 80.00 GiB, 25 % of it used by no tensor at the peak"
    )


def test_a_flushed_allocator_is_reported_even_with_room_left():
    held = holding(40, fragmentation_share=0.5, allocation_retries=3)

    assert check(held, machine(device=gpu())).because.endswith(
        "and was flushed 3 times to make room"
    )


@pytest.mark.parametrize(
    "held",
    [
        profile(kind="cuda"),
        profile(memory=story()),
        holding(40, fragmentation_share=0.5, allocation_retries=0),
        holding(78, fragmentation_share=0.1),
    ],
    ids=["not measured", "no pool", "room left", "well used"],
)
def test_it_is_silent_where_memory_is_not_short_or_well_used(held):
    assert check(held, machine(device=gpu())) is None


def test_the_technique_that_sets_every_name_of_the_setting_is_advised():
    finding = check(holding(72, fragmentation_share=0.25), machine(device=gpu()))

    assert finding.next.endswith("flatout tune --only expandable_segments train.py")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_it_is_silent_where_segments_grow_already(name):
    variables = {name: "max_split_size_mb:128,expandable_segments:True"}
    host = machine(device=gpu(), facts={"variables": variables})

    assert check(holding(72, fragmentation_share=0.25), host) is None
