"""From what the ceilings' passes saw to numbers. Pure; runs in the parent."""

import itertools
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from flatout.profiling.steps import groups_of

SURE_BATCHES = 2
"""Fewer batches than this after the prefetched ones make no rate."""


def flops_of_step(segments: Sequence[Mapping[str, Any]]) -> Mapping[str, float]:
    """Return the floating-point operations of one training step by dtype: medians over the steps.

    >>> rows = [{"who": 0, "by_dtype": {"float32": 6}}, {"who": 1, "by_dtype": {"float32": 4}}]
    >>> flops_of_step(rows)
    {'float32': 10}
    """
    if not segments:
        return {}
    steps: list[Counter[str]] = []
    for group in itertools.chain.from_iterable(groups_of(segments)):
        steps.append(Counter())
        for segment in group:
            steps[-1].update(segment["by_dtype"])
    names = sorted({name for step in steps for name in step})
    return {name: statistics.median(step[name] for step in steps) for name in names}


def main_dtype(flops: Mapping[str, float]) -> str:
    """Return the dtype in which most of the operations are done; empty where there are none.

    >>> main_dtype({"float32": 1.0, "bfloat16": 9.0})
    'bfloat16'
    """
    return max(flops, key=lambda name: flops[name]) if any(flops.values()) else ""


def drained_per_s(drained: Mapping[str, Any]) -> float | None:
    """Return samples per second of a drained loader; None where too few batches came.

    The clock starts when the batches that were prefetched during the workers' start are gone, or
    at half of the batches where there were not more.

    >>> drained_per_s({"times_s": [5.0, 6.0, 7.0], "samples": [8, 8, 8], "ahead": 0})
    8.0
    """
    times_s, samples = drained["times_s"], drained["samples"]
    first = min(drained["ahead"], (len(times_s) - 1) // 2)
    if len(times_s) - first < SURE_BATCHES:
        return None
    elapsed_s: float = times_s[-1] - times_s[first]
    return float(sum(samples[first + 1 :])) / elapsed_s if elapsed_s > 0 else None


def loaders_per_s(seen: Mapping[str, Any]) -> float | None:
    """Return samples per second of the training loaders; the slowest where a step draws of several.

    None where one of them could not be measured.
    """
    rates = [drained_per_s(drained) for drained in seen["loaders"].values()]
    known = [rate for rate in rates if rate]
    return min(known) if known and len(known) == len(rates) else None
