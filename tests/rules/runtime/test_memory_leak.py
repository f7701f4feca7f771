import pytest

from flatout.core.units import MIB
from flatout.rules.runtime.memory_leak import check
from tests.rules.memory_facts import story
from tests.techniques.facts import gpu, machine, profile


def test_a_leak_is_reported_with_its_line_and_when_memory_is_full():
    leaking = story(leak_bytes_per_step=16.0 * MIB, leak_by_line={"train.py:7": 16.0 * MIB})

    finding = check(profile(memory=leaking), machine())

    assert finding.of == "memory"
    assert finding.share == pytest.approx(1_000 / 1_024)
    assert finding.because == (
        "each step leaves 16.0 MiB behind, made at train.py:7 (n=8 steps); "
        "1,024 steps fill the 16.00 GiB there are"
    )


def test_on_a_gpu_the_memory_of_the_device_counts():
    leaking = story(leak_bytes_per_step=16.0 * MIB)

    finding = check(profile(kind="cuda", memory=leaking), machine(device=gpu()))

    assert finding.share == pytest.approx(1_000 / 5_120)


@pytest.mark.parametrize(
    "memory",
    [
        None,
        story(),
        story(leak_bytes_per_step=0.1 * MIB),
        story(leak_bytes_per_step=-16.0 * MIB),
        story(leak_bytes_per_step=16.0 * MIB, steps=3),
    ],
    ids=["not measured", "steady", "kept losses", "shrinking", "too few steps"],
)
def test_it_is_silent_where_nothing_of_weight_grows(memory):
    assert check(profile(memory=memory), machine()) is None
