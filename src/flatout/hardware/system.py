"""What of the host changes how training runs: compiler, huge pages, open files, disk, load."""

import os
import resource
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.hardware.limits import ROOT, read_text
from flatout.records.live import LiveHost
from flatout.records.messages import words

COMPILERS = ("g++", "clang++", "c++")
"""What inductor looks for on Linux besides `CXX`."""

PROBE_BYTES = 32 * 1024**2
"""Enough for a disk's steady speed, little enough for a slow one: 3 s at 10 MiB/s."""

BLOCK_BYTES = 1024**2

PROBE_LIMIT_S = 3.0
"""A probe may not hold anybody up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSpeed:
    """A short sequential write and read of one file, past the page cache where possible."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    free_bytes: int
    probe_bytes: int


def find_compiler() -> str | None:
    """Return the path of the C++ compiler that torch.compile would use on the CPU, or None."""
    chosen = os.environ.get("CXX", "").split()
    for name in (*chosen[:1], *COMPILERS):
        if path := shutil.which(name):
            return path
    return None


def huge_pages(root: Path = ROOT) -> str:
    """Return the mode of transparent huge pages: `always`, `madvise`, `never`; empty if unknown."""
    text = read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    return text.partition("[")[2].partition("]")[0]


def open_files_limit() -> tuple[int, int]:
    """Return the soft and the hard limit on open files of this process."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def disk_speed(folder: Path, *, probe_bytes: int = PROBE_BYTES) -> DiskSpeed:
    """Measure a write and a read in a folder; the file is gone afterwards.

    Raises:
        OSError: if the folder cannot be written.
    """
    free = shutil.disk_usage(folder).free
    # Gone even if this process is killed: it has no name.
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        written, write_s = _write(file.fileno(), probe_bytes)
        read, read_s = _read(file.fileno(), written)
    return DiskSpeed(
        write_bytes_per_s=written / write_s,
        read_bytes_per_s=read / read_s,
        free_bytes=free,
        probe_bytes=written,
    )


def _write(descriptor: int, wanted: int) -> tuple[int, float]:
    block = os.urandom(BLOCK_BYTES)  # compressing file systems would make zeros look fast
    start = time.perf_counter()
    written = 0
    while written < wanted and time.perf_counter() - start < PROBE_LIMIT_S:
        written += os.write(descriptor, block)
    os.fsync(descriptor)
    return written, time.perf_counter() - start


def _read(descriptor: int, wanted: int) -> tuple[int, float]:
    if hasattr(os, "posix_fadvise"):  # drop the pages just written, else memory is measured
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    start = time.perf_counter()
    done = 0
    while done < wanted and time.perf_counter() - start < PROBE_LIMIT_S:
        block = os.read(descriptor, BLOCK_BYTES)
        if not block:
            break
        done += len(block)
    return done, time.perf_counter() - start


class HostMeter:
    """Reads the host; rates are those since the reading before.

    It says how busy cores, memory and disks are between two looks.
    """

    def __init__(self) -> None:
        self.before_s = time.monotonic()
        self.missing: dict[str, str] = {}
        self.disks = self._disks()
        self._ask("cpu_share", "cpu_percent")  # the first answer is about nothing

    def read(self) -> LiveHost:
        """Return the host's state now."""
        self.missing = {}
        now_s, disks = time.monotonic(), self._disks()
        passed_s = max(now_s - self.before_s, 1e-3)
        read = written = None
        if disks and self.disks:
            read, written = ((disks[i] - self.disks[i]) / passed_s for i in range(2))
        self.before_s, self.disks = now_s, disks
        memory = self._ask("memory_used_bytes", "virtual_memory")
        busy_percent = self._ask("cpu_share", "cpu_percent")
        return LiveHost(
            cpu_share=None if busy_percent is None else busy_percent / 100,
            cores=os.cpu_count() or 1,
            memory_used_bytes=memory.total - memory.available if memory else None,
            memory_total_bytes=memory.total if memory else None,
            disk_read_bytes_per_s=read,
            disk_write_bytes_per_s=written,
            missing=self.missing,
        )

    def _disks(self) -> tuple[int, int] | None:
        """Return bytes read and written since the machine started, over all disks."""
        found = self._ask("disk_read_bytes_per_s", "disk_io_counters")
        if found is None:
            self.missing.setdefault("disk_read_bytes_per_s", words("counter.no_disk"))
            return None
        return found.read_bytes, found.write_bytes

    def _ask(self, field: str, question: str) -> Any:
        """Return an answer of psutil's; None where the system refuses, with the reason noted."""
        import psutil

        try:
            return getattr(psutil, question)()
        except (OSError, RuntimeError, ValueError, psutil.Error) as error:  # no /proc/stat
            self.missing[field] = str(error)
            return None
