"""A slow storage for real readers: a folder mounted once more through FUSE, read-only and late.

    python -m benchmarks.slow_storage FOLDER MOUNT --seek-ms 10 --mb-per-s 100 --at-once 1

Every request that does not begin where the last one of its file ended waits for a seek, and every
byte for its turn at the bandwidth. The kernel's page cache is in front of it, as of any disk or
network share: what was read stays until it is dropped, mapped files fault, and the kernel reads
ahead. Names and attributes cost nothing, which favours many small files.

It needs Linux, /dev/fuse, the right to mount, libfuse (Debian: libfuse3-3) and `mfusepy` from PyPI.
"""

import argparse
import ctypes
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.programs import ran

COUNTS = "user.flatout.counts"
"""The extended attribute of the mounted folder that tells what was asked for so far."""
START_S = 20.0
PR_SET_PDEATHSIG = 1
"""From linux/prctl.h."""
MNT_DETACH = 2
"""From sys/mount.h."""
CACHED = {"attr_timeout": 3600, "entry_timeout": 3600, "negative_timeout": 3600}
THREADS = 32
"""That answer requests; more than any `at_once` here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """How slow a storage is."""

    seek_ms: float
    """Of a request that does not go on where the last one of its file ended; a network's trip."""
    mb_per_s: float
    """For all requests together."""
    at_once: int
    """Seeks or trips that overlap: one arm of a disk, many requests under way in a network."""


class Late:
    """Lets the thread of each request wait as long as a storage of this speed would take."""

    def __init__(self, speed: Speed) -> None:
        self.speed = speed
        self.requests = self.seeks = self.bytes = 0
        self._arms = threading.Semaphore(speed.at_once)
        self._lock = threading.Lock()
        self._ends: dict[str, int] = {}
        self._free_at = 0.0
        """When the bandwidth is free for the next request."""

    def wait(self, name: str, begin: int, count: int) -> None:
        """Return when these bytes of a file would be there."""
        with self._arms:
            if self._is_elsewhere(name, begin, count):
                time.sleep(self.speed.seek_ms / 1e3)
            time.sleep(max(0.0, self._turn(count) - time.monotonic()))

    def _is_elsewhere(self, name: str, begin: int, count: int) -> bool:
        with self._lock:
            is_elsewhere = self._ends.get(name) != begin
            self._ends[name] = begin + count
            self.requests += 1
            self.seeks += is_elsewhere
            self.bytes += count
            return is_elsewhere

    def _turn(self, count: int) -> float:
        """Return when the last of these bytes has come through."""
        with self._lock:
            begun = max(self._free_at, time.monotonic())
            self._free_at = begun + count / (self.speed.mb_per_s * 1e6)
            return self._free_at

    def counts(self) -> dict[str, int]:
        """Return what was asked for so far."""
        return {"requests": self.requests, "seeks": self.seeks, "bytes": self.bytes}


def find_missing() -> str:
    """Return what this machine lacks for the storage, and how it is had; empty if nothing."""
    if not sys.platform.startswith("linux") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "the slow storage needs Linux with a /dev/fuse that may be written"
    tried = [sys.executable, "-c", "import mfusepy"]
    done = ran(tried)
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"the slow storage needs `pip install mfusepy` and libfuse (libfuse3-3): {last}"
    return ""


@contextmanager
def mounted(folder: Path, mount: Path, speed: Speed) -> Iterator[Path]:
    """Show a folder once more behind a slow storage, as long as the block runs."""
    mount.mkdir(parents=True, exist_ok=True)
    words = [f"--{name.replace('_', '-')}={value}" for name, value in asdict(speed).items()]
    command = [sys.executable, "-m", "benchmarks.slow_storage", str(folder), str(mount), *words]
    root = Path(__file__).parent.parent
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=root) as server:
        try:
            _await_mount(mount, server)
            yield mount
        finally:
            # Detached first: a server that ends under a mount leaves one that no one answers for.
            ctypes.CDLL(None, use_errno=True).umount2(os.fsencode(mount), MNT_DETACH)
            server.terminate()


def _await_mount(mount: Path, server: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + START_S
    while not os.path.ismount(mount):
        if server.poll() is not None or time.monotonic() > until:
            server.kill()
            said = (server.communicate()[1] or "").strip()[-300:]
            raise OSError(errno.ENODEV, f"the slow storage could not be mounted: {said}")
        time.sleep(0.02)


def counts_of(mount: Path) -> dict[str, int]:
    """Return requests, seeks and bytes of a mounted storage so far."""
    found: dict[str, int] = json.loads(os.getxattr(mount, COUNTS))
    return found


class Behind:
    """What FUSE asks of a file system: the folder's files, each read after its wait."""

    use_ns = True

    def __init__(self, folder: Path, late: Late) -> None:
        self.folder = folder
        self.late = late

    def _at(self, path: str) -> Path:
        return self.folder / path[1:]

    def init(self, path: str) -> None:
        """Begin."""

    def destroy(self, path: str) -> None:
        """End."""

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        """Return a file's attributes."""
        found = self._at(path).lstat()
        names = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid")
        plain = {name: getattr(found, name) for name in names}
        return plain | {f"st_{of}time": getattr(found, f"st_{of}time_ns") for of in "acm"}

    def readdir(self, path: str, fh: int) -> list[str]:
        """Return the names in a folder."""
        return [".", "..", *(entry.name for entry in self._at(path).iterdir())]

    def open(self, path: str, flags: int) -> int:
        """Open a file."""
        return os.open(self._at(path), os.O_RDONLY)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        """Return bytes of a file, late."""
        found = os.pread(fh, size, offset)
        self.late.wait(path, offset, len(found))
        return found

    def release(self, path: str, fh: int) -> int:
        """Close a file."""
        os.close(fh)
        return 0

    def getxattr(self, path: str, name: str, position: int = 0) -> bytes:
        """Return what was asked for so far."""
        if name != COUNTS:
            raise OSError(errno.ENODATA, name)
        return json.dumps(self.late.counts()).encode()


def serve(folder: Path, mount: Path, speed: Speed) -> None:
    """Mount the folder and answer for it until it is unmounted."""
    import mfusepy

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever mounted it unmounts it
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # or is gone, however it ended
    mfusepy.FUSE(
        Behind(folder, Late(speed)),
        str(mount),
        foreground=True,
        ro=True,
        kernel_cache=True,
        max_threads=THREADS,
        fsname="slow_storage",
        **CACHED,
    )


def main(arguments: Sequence[str]) -> int:
    """Mount a folder and stay."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("mount", type=Path)
    parser.add_argument("--seek-ms", type=float, required=True)
    parser.add_argument("--mb-per-s", type=float, required=True)
    parser.add_argument("--at-once", type=int, required=True)
    args = parser.parse_args(arguments)
    speed = Speed(seek_ms=args.seek_ms, mb_per_s=args.mb_per_s, at_once=args.at_once)
    serve(args.folder.resolve(), args.mount, speed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
