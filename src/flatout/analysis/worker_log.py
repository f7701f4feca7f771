"""What a process that makes batches noted about itself: one fixed-size record now and then.

A loader's worker appends to a file of its own in the trial's folder, so that nothing passes through
the loader's queues and what was written outlives `os._exit` and a kill. Every process reads its own
counters: that costs the training thread nothing, and it is allowed where reading others' is not.
Standard library only; no random stream is touched.
"""

import os
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

FIELDS = (
    *("at_s", "number", "read_s", "decode_s", "collate_s", "batches"),
    *("user_s", "system_s", "voluntary", "involuntary"),
    *("read_bytes", "storage_bytes", "anonymous_bytes", "pss_bytes"),
)
"""Counters since the process began, with the moment on the clock that all processes share. A count
of bytes below zero is minus the error number with which the kernel refused it."""
RECORD = struct.Struct(f"<{len(FIELDS)}d")
PREFIX = "journey-"
WRITE_EVERY_S = 0.05
"""A record costs some 30 us (getrusage, /proc/self/io, one write): below 0.1 % of a worker."""
THINNED_AFTER = 500
"""Records after which the pause between two doubles: a long run's file stays below 1 MiB."""
MAX_KEPT = 120
"""Records kept of each process; their first and last in the window are what counts."""
PSS_EVERY_S = 0.5
PSS_COST_FACTOR = 1_000
"""Reading the proportional set size walks the page tables, 0.1 to 10 ms: the next reading waits a
thousand times as long as the last one took."""


class OwnBytes:
    """This process's counters of bytes; each is refused or given by the kernel."""

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self.proc = proc
        self.pss = 0.0
        self._next_pss_s = 0.0

    def read(self, moment: float) -> tuple[float, float, float, float]:
        """Return bytes read, bytes that storage delivered, anonymous and proportional memory."""
        if moment >= self._next_pss_s:
            self.pss = read_pss(self.proc)
            took_s = time.perf_counter() - moment
            self._next_pss_s = moment + max(PSS_EVERY_S, PSS_COST_FACTOR * took_s)
        return (*read_io(self.proc), read_anonymous(self.proc), self.pss)


def read_io(proc: Path) -> tuple[float, float]:
    """Return `rchar` and `read_bytes`, or minus the error number for both."""
    try:
        lines = (proc / "io").read_bytes().decode().splitlines()
    except OSError as error:
        return (-float(error.errno or 1),) * 2
    values = {name: float(value) for name, _, value in (line.partition(": ") for line in lines)}
    return values.get("rchar", -1.0), values.get("read_bytes", -1.0)


def read_anonymous(proc: Path) -> float:
    """Return the resident bytes that are in no file and are shared by no one, or minus the error.

    A counter of the kernel's, read at once. What a fork shares counts from the start: pages that
    are copied when they are written to show in the proportional set size alone.
    """
    try:
        _, resident, shared = map(int, (proc / "statm").read_bytes().split()[:3])
    except OSError as error:
        return -float(error.errno or 1)
    return float((resident - shared) * os.sysconf("SC_PAGE_SIZE"))


def read_pss(proc: Path) -> float:
    """Return the proportional set size in bytes, or minus the error number."""
    try:
        text = (proc / "smaps_rollup").read_bytes().decode()
    except OSError as error:
        return -float(error.errno or 1)
    found = (line.split()[1] for line in text.splitlines() if line.startswith("Pss:"))
    return 1024.0 * float(next(found, "0"))


class WorkerLog:
    """The file of one worker."""

    def __init__(self, folder: Path) -> None:
        self.descriptor = os.open(
            folder / f"{PREFIX}{os.getpid()}", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
        )
        self.written = 0
        self.next_at_s = 0.0
        self.pause_s = WRITE_EVERY_S

    def write(self, moment: float, record: Callable[[], Sequence[float]]) -> None:
        """Append the record unless the last one is young."""
        if moment < self.next_at_s:
            return
        os.write(self.descriptor, RECORD.pack(*record()))
        self.written += 1
        if self.written % THINNED_AFTER == 0:
            self.pause_s *= 2
        self.next_at_s = moment + self.pause_s


def read_log(folder: Path, pid: int) -> list[list[float]]:
    """Return the records of one process, thinned; a half-written last one is left out."""
    try:
        raw = (folder / f"{PREFIX}{pid}").read_bytes()
    except OSError:
        return []
    whole = len(raw) // RECORD.size * RECORD.size
    return thinned([list(record) for record in RECORD.iter_unpack(raw[:whole])])


def thinned(records: list[list[float]]) -> list[list[float]]:
    """Return at most about `MAX_KEPT` records, evenly, the last one always.

    >>> thinned([[1.0], [2.0]])
    [[1.0], [2.0]]
    """
    every = -(-len(records) // MAX_KEPT)
    return records if every <= 1 else [*records[:-1:every], records[-1]]


def named(record: Sequence[float]) -> Mapping[str, float]:
    """Return a record's values by name."""
    return dict(zip(FIELDS, record, strict=True))
