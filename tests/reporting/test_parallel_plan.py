"""Ways to spread a training in words."""

from dataclasses import replace

import pytest

from flatout.records.parallel import ParallelSpec
from flatout.records.plan import (
    Amount,
    NumberSource,
    ParallelAdvice,
    ParallelPlan,
    Plan,
    TaggedNumber,
)
from flatout.reporting.plan import rejected, render_plan, spread_command

NOTHING = Amount(bytes=1, source=NumberSource.TRACED)


def way(spec, step_ms=10.0, why="computing"):
    return ParallelPlan(
        spec=spec,
        ranks=spec.world_size,
        fits=step_ms is not None,
        why=why,
        step_ms=None
        if step_ms is None
        else TaggedNumber(value=step_ms, source=NumberSource.ASSUMED),
        peak_bytes=TaggedNumber(value=2**30, source=NumberSource.SIMULATED),
        shares={"communication": TaggedNumber(value=0.25, source=NumberSource.ASSUMED)},
    )


def plan(*ways, ranks=4, asked=4, spec=None):
    advice = ParallelAdvice(
        verdict="Use all 4 GPUs.", ranks=ranks, asked=asked, spec=spec or ways[0].spec, batch=64
    )
    return Plan(
        target="train.py",
        device="a GPU",
        capacity_bytes=2**33,
        batch=64,
        allocated=NOTHING,
        reserved=NOTHING,
        used=NOTHING,
        components={},
        peak_phase="forward",
        parallel=ways,
        advice=advice,
    )


def test_the_verdict_comes_first_and_rejected_ways_have_a_line_each():
    ways = way(ParallelSpec(dp_replicate=4)), way(ParallelSpec(tp=4), None, "tp=4 is too many")

    lines = render_plan(plan(*ways), workload="train.py").splitlines()

    assert lines[0] == "Use all 4 GPUs."
    assert any(line.startswith("dp_replicate=4") and "25 %" in line for line in lines)
    assert "rejected  tp=4: tp=4 is too many" in lines


def test_too_many_rejected_ways_are_counted():
    ways = [way(ParallelSpec(dp_replicate=n), None) for n in range(2, 22)]

    assert rejected(ways).rows[-1] == ("rejected", "8 more; --json has them all")


def test_the_next_command_trains_as_advised():
    spec = ParallelSpec(dp_shard=4, zero=3)

    assert spread_command(plan(way(spec)), "train.py") == "flatout run --gpus 4 --zero 3 train.py"
    offloaded = spread_command(plan(way(replace(spec, offload=True))), "train.py")
    assert offloaded == "flatout run --gpus 4 --zero 3 --offload train.py"
    words = "with [parallel] dp_shard=4 zero=3 in it"
    assert spread_command(plan(way(spec)), "t.py:task").endswith(words)
    assert spread_command(plan(way(spec), ranks=1), "train.py") is None


@pytest.mark.parametrize(
    ("hosts", "ranks", "command"),
    [
        (4, 16, "flatout run --gpus 4 --hosts 4 --rendezvous HOST:PORT train.py"),
        (4, 8, "flatout run --gpus 4 --hosts 2 --rendezvous HOST:PORT train.py"),
        (1, 8, "flatout run --gpus 4 --hosts 2 --rendezvous HOST:PORT train.py"),
        (4, 2, "flatout run --gpus 2 train.py"),
    ],
)
def test_the_next_command_asks_for_no_more_gpus_of_a_host_than_it_has(hosts, ranks, command):
    advised = plan(way(ParallelSpec(dp_replicate=ranks)), ranks=ranks, asked=4 * hosts)
    there = replace(advised, environment={"gpus": 4, "hosts": hosts})

    assert spread_command(there, "train.py") == command


def test_the_next_command_for_shards_inside_hosts_is_a_recipe_s():
    spec = ParallelSpec(dp_replicate=2, dp_shard=4, zero=3)
    there = replace(plan(way(spec), ranks=8, asked=8), environment={"gpus": 4, "hosts": 2})

    assert spread_command(there, "train.py") == (
        "flatout run --with recipe.toml --gpus 4 --hosts 2 --rendezvous HOST:PORT train.py, "
        "with [parallel] dp_replicate=2 dp_shard=4 zero=3 in it"
    )


def test_json_has_every_way_with_its_sources():
    plain = plan(way(ParallelSpec(dp_replicate=4))).to_json()

    (found,) = plain["parallel"]
    assert found["spec"]["dp_replicate"] == 4
    assert found["step_ms"] == {"value": 10.0, "source": "assumed"}
    assert plain["advice"]["ranks"] == 4
