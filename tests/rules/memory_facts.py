"""Small memory stories and sync points to offer rules to."""

from dataclasses import replace

from flatout.records.memory import MemoryStory
from flatout.records.readings import SyncPoint


def story(**changes):
    """Return the story of a training that is well: nothing grows."""
    known = MemoryStory(
        peak_bytes=1_000,
        peak_phase="backward",
        by_phase={"forward": 900, "backward": 1_000},
        by_module={"": 1_000},
        steps=8,
    )
    return replace(known, **changes)


def sync(**changes):
    """Return a wait of a tenth of the usual step."""
    known = SyncPoint(line="train.py:9", what="item", per_step=1.0, ms_per_step=10.0)
    return replace(known, **changes)
