"""From the memory probe's books and counted waits to the report. Pure; runs in the parent.

`memory_story` says what grew, `sync_points` which lines wait.
"""

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from flatout.records.memory import MemoryStory, TensorAtPeak
from flatout.records.readings import SyncPoint

MIN_STAYING = 0.5
"""Least part of a growth that is found as allocations of earlier steps: live locals of the last
step are none of those."""
MAX_FALLING = 0.2
"""Share of the pairs of steps of which the later one may have left less."""


def memory_story(seen: Mapping[str, Any]) -> MemoryStory | None:
    """Return the story of what the probe saw, None when no step was observed."""
    ends = seen["ends"]
    if not ends:
        return None
    # The allocator's own peaks, where it keeps them: it knows of rounding.
    by_phase = seen.get("peaks") or seen["by_phase"]
    by_line = {line: count / max(1, len(ends) - 1) for line, count in seen["grown_by_line"].items()}
    phase = max(by_phase, key=lambda name: by_phase[name])
    return MemoryStory(
        peak_bytes=by_phase[phase],
        peak_phase=phase,
        by_phase=by_phase,
        by_module=seen["by_module"],
        largest=tuple(
            TensorAtPeak(**item | {"shape": tuple(item["shape"])}) for item in seen["largest"]
        ),
        timeline=tuple((float(ms), int(count)) for ms, count in seen["timeline"]),
        leak_bytes_per_step=leak_of(ends, by_line),
        leak_by_line=by_line,
        kept_graph_nodes_per_step=slope(seen["kept_graph_nodes"]),
        kept_graph_names=tuple(seen["kept_graph_names"]),
        steps=len(ends),
        reserved_bytes=seen.get("reserved_bytes"),
        fragmentation_share=seen.get("fragmentation_share"),
        allocation_retries=seen.get("allocation_retries"),
        snapshot=seen.get("snapshot"),
    )


def leak_of(ends: Sequence[float], by_line: Mapping[str, float]) -> float:
    """Return the bytes that each step leaves behind; 0 where what is left only goes up and down.

    At a step's end its last batch and outputs still live, and batches of other lengths leave other
    amounts: over a few steps that has a slope, too. A leak is made of allocations that stay.

    Args:
        ends: Bytes left at the end of each observed step.
        by_line: Bytes a step of earlier steps' allocations that still live, by the line.

    >>> leak_of([100, 200, 300, 400], {"train.py:9": 100.0})
    100.0
    >>> leak_of([900, 1010, 950, 1100, 980, 1120], {})
    0.0
    """
    growth = slope(ends)
    is_leak = rises(ends) and sum(by_line.values()) >= MIN_STAYING * growth
    return growth if is_leak else 0.0


def rises(values: Sequence[float]) -> bool:
    """Return whether values grow with hardly a way back: noise falls in every other pair.

    >>> rises([1, 2, 2, 3, 3, 4]), rises([1, 3, 2, 3, 1, 2]), rises([2, 2])
    (True, False, False)
    """
    pairs = list(combinations(values, 2))
    falling = sum(late < early for early, late in pairs)
    return slope(values) > 0 and falling <= MAX_FALLING * len(pairs)


def slope(values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs: one odd step does not move it.

    >>> slope([10, 20, 999, 40, 50]), slope([5])
    (10.0, 0.0)
    """
    return slope_of(list(enumerate(values)))


def slope_of(points: Sequence[tuple[float, float]]) -> float:
    """Return the same of values with the moments at which they were read.

    >>> slope_of([(0.0, 10), (0.5, 20), (2.0, 50)])
    20.0
    """
    pairs = combinations(points, 2)
    slopes = [(late - early) / (at - before) for (before, early), (at, late) in pairs]
    return float(statistics.median(slopes)) if slopes else 0.0


MIN_MS = 0.1
"""On the CPU a call that takes less in a step waits for nothing and is as cheap as any other."""
MAX_POINTS = 20
"""Lines kept; a reader fixes one after the other."""


def sync_points(seen: Mapping[str, Any], timed_share: float = 1.0) -> tuple[SyncPoint, ...]:
    """Return the lines that make the host wait, the costliest first.

    `timed_share` is a timed step's part of a watched one. On the CPU a call's time is mostly what
    watching it takes; a device is waited for as long as without.

    >>> seen = {"steps": 10, "on_device": False, "points": [["train.py:9", "item", 20, 1e-5]]}
    >>> sync_points(seen)[0].per_step, sync_points(seen)[0].ms_per_step
    (2.0, None)
    """
    scale = 1e3 if seen["on_device"] else 1e3 * timed_share
    points = []
    for line, what, count, wait_s in seen["points"] if seen["steps"] else ():
        ms = scale * wait_s / seen["steps"]
        is_worth_telling = seen["on_device"] or ms >= MIN_MS
        points.append(
            SyncPoint(
                line=line,
                what=what,
                per_step=count / seen["steps"],
                ms_per_step=ms if is_worth_telling else None,
            )
        )
    points.sort(key=lambda point: (-(point.ms_per_step or 0.0), -point.per_step, point.line))
    return tuple(points[:MAX_POINTS])
