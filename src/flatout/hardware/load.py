"""Whether a stretch of time was disturbed: run-queue delay, foreign work, stolen time.

Runs inside the training process, too: so it uses the standard library only and reads a few small
files. CPU time never decides: threads that wait at a barrier spin, and spinning looks like work.
"""

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from flatout.hardware.limits import affinity, quota_cores

TICKS_PER_S = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
"""The unit of /proc/stat and /proc/<pid>/stat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReading:
    """The kernel's counters at one moment. Only differences mean anything."""

    at_s: float
    waited_ns: Mapping[tuple[int, int], int]
    """Time each thread was runnable without a core, keyed by process and thread."""
    own_ticks: int
    """CPU time of the asked processes, children that have ended included."""
    busy_ticks: int
    """Work on the cores this process may use, by anybody."""
    steal_ticks: int
    """Time the hypervisor gave to others while a core here had work."""
    minor_faults: int
    """Page faults served from memory, of the first process only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What happened between two readings."""

    wall_s: float
    delay_share: float
    """Seconds that own threads waited for a core, per second."""
    foreign_share: float
    """Share of the usable cores that other processes took."""
    steal_share: float
    """Share of the usable cores that other virtual machines took."""
    minor_faults: int
    knows_delay: bool = True
    """False where the kernel keeps no run-queue statistics; `delay_share` is 0 then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMeter:
    """Reads the load on the cores that one job may use."""

    cpus: frozenset[int] = field(default_factory=affinity)
    """The cores to look at."""
    usable_cores: float = 0.0
    """How many of them a cgroup quota lets the job use; 0 means all of them."""
    proc: Path = Path("/proc")

    def read(self, pids: Iterable[int]) -> LoadReading:
        """Return the counters now, for processes that belong to the job; those gone count 0."""
        waited: dict[tuple[int, int], int] = {}
        own_ticks = 0
        minor_faults = None
        for pid in pids:
            waited |= self._waits(pid)
            faults, ticks = self._process(pid)
            own_ticks += ticks
            minor_faults = faults if minor_faults is None else minor_faults
        busy, steal = self._machine()
        return LoadReading(
            at_s=time.monotonic(),
            waited_ns=waited,
            own_ticks=own_ticks,
            busy_ticks=busy,
            steal_ticks=steal,
            minor_faults=minor_faults or 0,
        )

    def between(self, before: LoadReading, after: LoadReading) -> Load:
        """Return the load between two readings of the same job."""
        wall_s = max(after.at_s - before.at_s, 1e-9)
        cores = self.usable_cores or float(len(self.cpus))
        waited_ns = sum(
            max(0, value - before.waited_ns.get(key, 0)) for key, value in after.waited_ns.items()
        )
        own = after.own_ticks - before.own_ticks
        foreign_cores = (after.busy_ticks - before.busy_ticks - own) / TICKS_PER_S / wall_s
        steal_cores = (after.steal_ticks - before.steal_ticks) / TICKS_PER_S / wall_s
        out_of_reach = len(self.cpus) - cores
        return Load(
            wall_s=wall_s,
            delay_share=waited_ns / 1e9 / wall_s,
            foreign_share=max(0.0, foreign_cores - out_of_reach) / cores,
            steal_share=max(0.0, steal_cores) / cores,
            minor_faults=after.minor_faults - before.minor_faults,
            knows_delay=bool(after.waited_ns),
        )

    def _waits(self, pid: int) -> dict[tuple[int, int], int]:
        waits = {}
        for name in _names(f"{self.proc}/{pid}/task"):
            # "time on a core, time waiting for one, time slices": nanoseconds, see sched-stats.rst
            columns = _text(f"{self.proc}/{pid}/task/{name}/schedstat").split()
            if len(columns) >= 2:
                waits[pid, int(name)] = int(columns[1])
        return waits

    def _process(self, pid: int) -> tuple[int, int]:
        """Return minor faults and CPU ticks; a child's ticks move here when it has ended."""
        columns = _text(f"{self.proc}/{pid}/stat").rpartition(")")[2].split()
        if len(columns) < 15:
            return 0, 0
        # From "state" on: minflt is column 7, utime stime cutime cstime are 11 to 14 (proc(5)).
        return int(columns[7]), sum(int(value) for value in columns[11:15])

    def _machine(self) -> tuple[int, int]:
        """Return busy and stolen ticks of the cores in `cpus`."""
        wanted = {f"cpu{number}" for number in self.cpus}
        busy = steal = 0
        for line in _text(f"{self.proc}/stat").splitlines():
            name, *columns = line.split()
            if name not in wanted:
                continue
            user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, columns[:8])
            busy += user + nice + system + irq + softirq
            steal += stolen
        return busy, steal


def load_meter() -> LoadMeter:
    """Return a meter for the cores and the quota of this process."""
    cpus = affinity()
    quota = quota_cores()
    return LoadMeter(cpus=cpus, usable_cores=min(quota, len(cpus)) if quota else 0.0)


def process_tree(pid: int, *, proc: Path = Path("/proc")) -> tuple[int, ...]:
    """Return the process and everything below it: loader workers and their fork server too."""
    found = [pid]
    for parent in found:
        for thread in _names(f"{proc}/{parent}/task"):
            children = _text(f"{proc}/{parent}/task/{thread}/children").split()
            found.extend(int(child) for child in children)
    return tuple(found)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208  half the cost of pathlib, once per thread
    except OSError:
        return []


def _text(path: str) -> str:
    """Return a small file's text; empty when the process or thread has just ended."""
    try:
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123  as above
            return file.read().decode(errors="replace")
    except OSError:
        return ""
