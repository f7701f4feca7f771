"""From counted waits to the report's sync points. Pure; runs in the parent."""

from collections.abc import Mapping
from typing import Any

from flatout.core.readings import SyncPoint

MIN_MS = 0.1
"""On the CPU a call that takes less in a step waits for nothing and is as cheap as any other."""
MAX_POINTS = 20
"""Lines kept; a reader mends one after the other."""


def sync_points(seen: Mapping[str, Any]) -> tuple[SyncPoint, ...]:
    """Return the lines that make the host wait, the costliest first.

    >>> seen = {"steps": 10, "on_device": False, "points": [["train.py:9", "item", 20, 1e-5]]}
    >>> sync_points(seen)[0].per_step, sync_points(seen)[0].ms_per_step
    (2.0, None)
    """
    points = [_point(seen, *point) for point in seen["points"] if seen["steps"]]
    points.sort(key=lambda point: (-(point.ms_per_step or 0.0), -point.per_step, point.line))
    return tuple(points[:MAX_POINTS])


def _point(seen: Mapping[str, Any], line: str, what: str, count: float, wait_s: float) -> SyncPoint:
    ms = 1e3 * wait_s / seen["steps"]
    is_worth_telling = seen["on_device"] or ms >= MIN_MS
    return SyncPoint(
        line=line,
        what=what,
        per_step=count / seen["steps"],
        ms_per_step=ms if is_worth_telling else None,
    )
