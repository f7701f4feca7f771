"""From the books of the observed steps to the report's memory story. Pure; runs in the parent."""

import statistics
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from flatout.core.memory import MemoryStory, TensorAtPeak


def memory_story(seen: Mapping[str, Any]) -> MemoryStory | None:
    """Return the story of what the probe saw, None when no step was observed."""
    ends = seen["ends"]
    if not ends:
        return None
    # The allocator's own peaks, where it keeps them: it knows of rounding.
    by_phase = seen.get("peaks") or seen["by_phase"]
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
        leak_bytes_per_step=slope(ends),
        leak_by_line={
            line: count / max(1, len(ends) - 1) for line, count in seen["grown_by_line"].items()
        },
        kept_graph_nodes_per_step=slope(seen["kept_graph_nodes"]),
        kept_graph_names=tuple(seen["kept_graph_names"]),
        steps=len(ends),
        reserved_bytes=seen.get("reserved_bytes"),
        fragmentation_share=seen.get("fragmentation_share"),
        allocation_retries=seen.get("allocation_retries"),
        snapshot=seen.get("snapshot"),
    )


def slope(values: Sequence[float]) -> float:
    """Return the median of the slopes between all pairs: one odd step does not move it.

    >>> slope([10, 20, 999, 40, 50]), slope([5])
    (10.0, 0.0)
    """
    pairs = combinations(enumerate(values), 2)
    slopes = [(late - early) / (at - before) for (before, early), (at, late) in pairs]
    return float(statistics.median(slopes)) if slopes else 0.0
