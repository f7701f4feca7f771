"""What this process may use of the host: cores, memory, shared memory.

`os.cpu_count()` and even the affinity mask show the host's cores inside a container that has a
CPU quota; the quota is in the cgroup files, of this group or of any group above it.
"""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path("/")
BALLOONED_SHARE = 0.9
"""The kernel's own tables take some 2 % of the memory, a reserve for crash dumps a little more:
where MemTotal lacks more than a tenth, a balloon holds it."""


def affinity() -> frozenset[int]:
    """Return the cores this process may be scheduled on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota_cores(root: Path = ROOT) -> float | None:
    """Return the tightest CPU quota from here up the cgroup tree, in cores; None without one."""
    folders = cgroup_folders("cpu", root)
    return min((quota for folder in folders for quota in _quotas(folder)), default=None)


def usable_cores(root: Path = ROOT) -> int:
    """Return how many cores this process may really use, rounded down, at least 1."""
    quota = quota_cores(root)
    cores = len(affinity())
    return cores if quota is None else max(1, math.floor(min(quota, cores)))


def memory_limit_bytes(root: Path = ROOT) -> int | None:
    """Return the tightest memory limit from here up the cgroup tree; None without one."""
    host = host_memory_bytes(root)
    limits = []
    for folder in cgroup_folders("memory", root):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = read_text(folder / name)
            # Version 1 writes a number near 2**63 for "no limit", version 2 the word "max".
            if text.isdigit() and int(text) < host:
                limits.append(int(text))
    return min(limits, default=None)


class MemoryShortage(NamedTuple):
    """What the kernel has counted for the control groups of this process, and for those above."""

    num_kills: int
    """Processes that it killed because memory ran out, in the group or on the whole machine."""
    stalled_s: float
    """Time in which a process of the group waited for memory: reclaimed, swapped or read again."""


def memory_shortage(root: Path = ROOT) -> MemoryShortage:
    """Return the kernel's counts since the group was made; zeros where it keeps none.

    Reaching a limit is not among them: files that were read fill a group up to it, at no cost.
    """
    kills, stalled = [0], [0]
    for folder in cgroup_folders("memory", root):
        for name in ("memory.events", "memory.oom_control"):  # of version 2, of version 1
            kills += map(
                int, re.findall(r"^oom_kill (\d+)$", read_text(folder / name), re.MULTILINE)
            )
        text = read_text(folder / "memory.pressure")
        stalled += map(int, re.findall(r"^some .*\btotal=(\d+)", text, re.MULTILINE))
    return MemoryShortage(num_kills=max(kills), stalled_s=max(stalled) / 1e6)


def host_memory_bytes(root: Path = ROOT) -> int:
    """Return the memory of the host, with what a balloon keeps from a virtual machine for now.

    A virtual machine may start small and be given more when it asks: MemTotal leaves out what the
    balloon holds, the pages that are present do not.
    """
    known = _meminfo(root).get("MemTotal")
    if known is not None:
        present = _present_bytes(root)
        return present if known < BALLOONED_SHARE * present else known
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _present_bytes(root: Path) -> int:
    pages = re.findall(r"^\s*present\s+(\d+)$", read_text(root / "proc/zoneinfo"), re.MULTILINE)
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def swap_bytes(root: Path = ROOT) -> tuple[int, int]:
    """Return the size of the swap space and how much of it is in use."""
    table = _meminfo(root)
    total = table.get("SwapTotal", 0)
    return total, total - table.get("SwapFree", 0)


def shm_bytes(folder: Path = Path("/dev/shm")) -> tuple[int, int]:  # noqa: S108  the mount itself
    """Return the size of the shared-memory mount and what is free in it; zeros without one."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return 0, 0
    return facts.f_blocks * facts.f_frsize, facts.f_bavail * facts.f_frsize


def cgroup_folders(controller: str, root: Path = ROOT) -> tuple[Path, ...]:
    """Return the folders that may limit this process for a controller, innermost first.

    Both cgroup versions are looked at, since a host can run them side by side.
    """
    folders: list[Path] = []
    mounts = tuple(_mounts(root))
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _number, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        for kind, options, top, point in mounts:
            if names and kind == "cgroup" and controller in options:
                folders.extend(_upwards(point, top, path))
            if not names and kind == "cgroup2":
                folders.extend(_upwards(point, top, path))
    return tuple(folders)


def read_text(path: Path) -> str:
    """Return a small file's text without surrounding blanks; empty when it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _upwards(point: Path, top: str, path: str) -> Iterator[Path]:
    """Walk from the group to the mount point.

    `top` is the part of the tree that is mounted. In a container it is often the container's own
    group, and then the path seen from the host is not below it.
    """
    inside = Path(path)
    relative = inside.relative_to(top) if inside.is_relative_to(top) else Path()
    if ".." in relative.parts:
        relative = Path()
    for part in (relative, *relative.parents):
        yield point / part


def _mounts(root: Path) -> Iterator[tuple[str, list[str], str, Path]]:
    """Yield type, options, mounted part and mount point of every cgroup mount."""
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        before, separator, after = line.partition(" - ")
        columns, kinds = before.split(), after.split()
        if not separator or len(columns) < 5 or kinds[0] not in ("cgroup", "cgroup2"):
            continue
        point = columns[4].replace("\\040", " ").lstrip("/")
        yield kinds[0], kinds[-1].split(","), columns[3], root / point


def _quotas(folder: Path) -> Iterator[float]:
    """Yield the quotas of a group in cores, of either version."""
    columns = read_text(folder / "cpu.max").split()
    if len(columns) == 2 and columns[0] != "max":
        yield int(columns[0]) / int(columns[1])
    quota = read_text(folder / "cpu.cfs_quota_us")
    period = read_text(folder / "cpu.cfs_period_us")
    if quota.isdigit() and period.isdigit():  # -1 means no quota
        yield int(quota) / int(period)


def _meminfo(root: Path) -> dict[str, int]:
    table = {}
    for line in read_text(root / "proc/meminfo").splitlines():
        name, _colon, rest = line.partition(":")
        columns = rest.split()
        if len(columns) == 2:  # all sizes are given in kB
            table[name] = int(columns[0]) * 1024
    return table
