import pytest

from benchmarks.bench import Bench
from benchmarks.suites import plan_ranks
from flatout.hardware.machine import read_machine
from flatout.records.units import GIB


def seen(seconds, host_bytes):
    return {
        "seconds": seconds,
        "host_bytes": host_bytes,
        "ways": 40,
        "fitting": 12,
        "verdict": "Use all 1024 GPUs",
    }


def test_the_slowest_and_the_largest_round_decide():
    assert plan_ranks.record_of([seen(8.0, GIB / 2), seen(9.9, GIB / 2)]).holds
    assert not plan_ranks.record_of([seen(8.0, GIB / 2), seen(10.1, GIB / 2)]).holds
    assert not plan_ranks.record_of([seen(8.0, GIB / 2), seen(8.0, 1.1 * GIB)]).holds


@pytest.mark.slow
def test_a_small_model_is_planned_for_all_of_them(tmp_path):
    bench = Bench(machine=read_machine(torch=False), work=tmp_path, budget_s=1.0)

    (row,) = plan_ranks.run(bench).raw["rounds"]

    assert 0 < row["fitting"] <= row["ways"]
    assert row["verdict"]
    assert row["seconds"] > 0
    assert row["host_bytes"] > 1e8
