"""Tiling: what the same multiplications cost in another order, on one core of this CPU.

Each round is a fresh process of `scenarios/tiling.py`, which computes a product, a convolution and
attention in every way.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError, cells
from benchmarks.programs import python
from flatout.records.ablation import Comparison
from flatout.records.statistics import compare, gather
from flatout.records.units import format_ms, format_ratio
from flatout.workflow.demo import scenarios

THEME = "tiling"
LESSON = scenarios() / "tiling.py"
ROUNDS = 6
SIZE = 960
LEAST_RATIO = 10.0
BEST = ("product", "registers")
ROUND_S = 300.0


def run(bench: Bench, rounds: int = ROUNDS, size: int = SIZE) -> Record:
    """Run the example in fresh processes and compare every way with the naive loops."""
    seen: list[Mapping[str, Any]] = []
    for number in range(rounds):
        seen.append(one_round(size))
        bench.say(f"  round {number + 1} of {rounds}: {words(seen[-1])}")
    names = [(lesson, way) for lesson, one in seen[0].items() for way in one["ways"]]
    pairs = {name: against_naive(seen, *name) for name in names if name[1] != "naive"}
    best = pairs[BEST]
    return Record(
        theme=THEME,
        claim=f"the same multiplications in tiles that stay in registers are at least "
        f"{LEAST_RATIO:.0f} times as fast as in three plain loops, whole interval",
        holds=holds(pairs),
        finding=f"{format_ratio(best.ratio)} [{cells(best)[1]}]",
        table=[("way", "time", "GFLOP/s", "against naive", "95 % interval", "n")]
        + [row(seen, pairs, name) for name in names],
        raw={"size": size, "rounds": seen},
    )


def one_round(size: int) -> Mapping[str, Any]:
    """Return the operations and the seconds of every way of each lesson, in one fresh process.

    Raises:
        TrialFailedError: if the lesson could not run; a missing compiler is the usual reason.
    """
    done = python([str(LESSON), "--json", "--size", str(size)], timeout=ROUND_S)
    if done.returncode != 0:
        raise TrialFailedError((done.stderr.strip().splitlines() or ["it failed"])[-1])
    found: Mapping[str, Any] = json.loads(done.stdout)["lessons"]
    return found


def against_naive(seen: Sequence[Mapping[str, Any]], lesson: str, way: str) -> Comparison:
    """Return how many times as fast a way is as the naive loops; the process is the unit."""
    naive, other = (
        [statistics.median(one[lesson]["ways"][each]) for one in seen] for each in ("naive", way)
    )
    return compare(gather(naive, other))


def holds(pairs: Mapping[tuple[str, str], Comparison]) -> bool:
    """Return whether the whole interval of the register tiles is above the claim."""
    return pairs[BEST].interval[0] >= LEAST_RATIO


def row(
    seen: Sequence[Mapping[str, Any]],
    pairs: Mapping[tuple[str, str], Comparison],
    name: tuple[str, str],
) -> tuple[str, ...]:
    """Return a way's row of the table."""
    lesson, way = name
    spent_s = statistics.median(statistics.median(one[lesson]["ways"][way]) for one in seen)
    rate = seen[0][lesson]["flops"] / spent_s / 1e9
    ratio = cells(pairs[name]) if name in pairs else ("1.00x", "", "")
    return f"{lesson}, {way}", format_ms(1e3 * spent_s), f"{rate:.1f}", *ratio


def words(one: Mapping[str, Any]) -> str:
    """Return one round as a line."""
    return ", ".join(
        f"{lesson} {way} {format_ms(1e3 * statistics.median(times))}"
        for lesson, found in one.items()
        for way, times in found["ways"].items()
    )
