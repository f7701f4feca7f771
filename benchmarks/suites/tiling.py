"""Tiling: what the same multiplications cost in another order, on one core of this CPU.

Each round is a fresh process of `examples/tiling.py`, which computes one product in every way.
"""

import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench import Bench, Record, TrialFailedError, cells
from flatout.records.ablation import Comparison
from flatout.records.statistics import compare, gather
from flatout.records.units import format_ms, format_ratio

THEME = "tiling"
EXAMPLE = Path(__file__).parents[2] / "examples" / "tiling.py"
ROUNDS = 6
SIZE = 960
LEAST_RATIO = 10.0
MEANINGS = {
    "naive": "three loops, down the columns of B",
    "rows": "loops swapped, along the rows of B",
    "registers": "tiles of the result in registers",
    "torch": "the library, for comparison",
}
ROUND_S = 300.0


def run(bench: Bench, rounds: int = ROUNDS, size: int = SIZE) -> Record:
    """Run the example in fresh processes and compare every way with the naive loops."""
    seen: list[Mapping[str, Sequence[float]]] = []
    for number in range(rounds):
        seen.append(one_round(size))
        bench.say(f"  round {number + 1} of {rounds}: {words(seen[-1])}")
    pairs = {name: against_naive(seen, name) for name in seen[0] if name != "naive"}
    best = pairs["registers"]
    return Record(
        theme=THEME,
        claim=f"the same multiplications in tiles that stay in registers are at least "
        f"{LEAST_RATIO:.0f} times as fast as in three plain loops, whole interval",
        holds=holds(pairs),
        finding=f"{format_ratio(best.ratio)} [{cells(best)[1]}]",
        table=[("way", "time", "GFLOP/s", "against naive", "95 % interval", "n")]
        + [row(seen, pairs, name, size) for name in seen[0]],
        raw={"size": size, "rounds": seen},
        repeat=f"python -m benchmarks.run {THEME}",
    )


def one_round(size: int) -> Mapping[str, Sequence[float]]:
    """Return the seconds of every way in one fresh process.

    Raises:
        TrialFailedError: if the example could not run; a missing compiler is the usual reason.
    """
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--json", "--size", str(size)],
        capture_output=True,
        text=True,
        timeout=ROUND_S,
        check=False,
    )
    if done.returncode != 0:
        raise TrialFailedError((done.stderr.strip().splitlines() or ["it failed"])[-1])
    found: Mapping[str, Sequence[float]] = json.loads(done.stdout)["ways"]
    return found


def against_naive(seen: Sequence[Mapping[str, Sequence[float]]], name: str) -> Comparison:
    """Return how many times as fast a way is as the naive loops; the process is the unit."""
    naive, other = ([statistics.median(one[way]) for one in seen] for way in ("naive", name))
    return compare(gather(naive, other))


def holds(pairs: Mapping[str, Comparison]) -> bool:
    """Return whether the whole interval of the register tiles is above the claim."""
    return pairs["registers"].interval[0] >= LEAST_RATIO


def row(
    seen: Sequence[Mapping[str, Sequence[float]]],
    pairs: Mapping[str, Comparison],
    name: str,
    size: int,
) -> tuple[str, ...]:
    """Return a way's row of the table."""
    spent_s = statistics.median(statistics.median(one[name]) for one in seen)
    rate = 2 * size**3 / spent_s / 1e9
    meaning = MEANINGS.get(name, "tiles of that many rows in the caches")
    ratio = cells(pairs[name]) if name in pairs else ("1.00x", "", "")
    return f"{name}: {meaning}", format_ms(1e3 * spent_s), f"{rate:.1f}", *ratio


def words(one: Mapping[str, Any]) -> str:
    """Return one round as a line."""
    return ", ".join(f"{name} {format_ms(1e3 * statistics.median(s))}" for name, s in one.items())
