"""How much host memory is free for this process, its container and its siblings considered."""

import os
from collections.abc import Mapping
from pathlib import Path

from flatout.hardware.limits import ROOT, cgroup_folders, read_text

RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""How many ranks of one training share this host; set by torchrun."""


def local_ranks(environment: Mapping[str, str] | None = None) -> int:
    """Return how many ranks of this training share the host, at least 1.

    >>> local_ranks({"LOCAL_WORLD_SIZE": "4"}), local_ranks({})
    (4, 1)
    """
    text = (os.environ if environment is None else environment).get(RANKS_VARIABLE, "")
    return max(1, int(text)) if text.isdigit() else 1


def free_memory_bytes(root: Path = ROOT) -> int:
    """Return what could be allocated now without swapping, on the host and in every group above.

    Page cache counts as free: the kernel gives it back.
    """
    return max(0, min([_host_available(root), *_group_rooms(root)]))


def _host_available(root: Path) -> int:
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    return 0


def _group_rooms(root: Path) -> list[int]:
    rooms = []
    for folder in cgroup_folders("memory", root):
        limit = _first_number(folder, "memory.max", "memory.limit_in_bytes")
        used = _first_number(folder, "memory.current", "memory.usage_in_bytes")
        # Version 1 writes a number near 2**63 for "no limit".
        if limit is not None and used is not None and limit < 2**60:
            rooms.append(limit - used + _reclaimable(folder))
    return rooms


def _first_number(folder: Path, *names: str) -> int | None:
    texts = (read_text(folder / name) for name in names)
    return next((int(text) for text in texts if text.isdigit()), None)


def _reclaimable(folder: Path) -> int:
    for line in read_text(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0
