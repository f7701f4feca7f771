from dataclasses import replace

import pytest

from flatout.analysis.memory import memory_story
from flatout.records.readings import RankFacts
from flatout.records.units import MIB
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


def test_ranks_on_one_host_fill_its_memory_together_and_each_gpu_alone():
    leaking = story(leak_bytes_per_step=16.0 * MIB)
    rank = RankFacts(rank=0, step_ms=10.0, phases_ms={}, samples_per_s=1.0)
    ranks = tuple(replace(rank, rank=number) for number in range(4))

    on_cpu = check(replace(profile(memory=leaking), ranks=ranks), machine())
    on_gpu = check(
        replace(profile(kind="cuda", memory=leaking), ranks=ranks), machine(device=gpu())
    )

    assert on_cpu.because == (
        "each step leaves 16.0 MiB in each of 4 ranks behind (n=8 steps); "
        "256 steps fill the 16.00 GiB there are"
    )
    assert on_gpu.share == pytest.approx(1_000 / 5_120)


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


def seen(ends_mib, grown_by_line):
    return memory_story(
        {
            "ends": [MIB * end for end in ends_mib],
            "by_phase": {"backward": 2_000 * MIB},
            "by_module": {},
            "largest": [],
            "timeline": [],
            "grown_by_line": grown_by_line,
            "kept_graph_nodes": [],
            "kept_graph_names": [],
        }
    )


def test_batches_of_other_lengths_are_no_leak():
    noisy = [900, 1010, 950, 1100, 980, 1120, 1005, 1090]

    assert check(profile(memory=seen(noisy, {})), machine()) is None
    assert check(profile(memory=seen(noisy, {"train.py:7": 900 * MIB})), machine()) is None


def test_what_grows_though_no_earlier_step_left_it_is_no_leak():
    longer = range(900, 1_700, 100)

    assert check(profile(memory=seen(longer, {})), machine()) is None


def test_what_earlier_steps_left_and_no_step_frees_is_a_leak():
    growing = [900, 1000, 1105, 1195, 1300, 1400, 1500, 1600]

    finding = check(profile(memory=seen(growing, {"train.py:7": 700 * MIB})), machine())

    assert finding.evidence["leak_bytes_per_step"] == pytest.approx(100 * MIB)
    assert "made at train.py:7" in finding.because
