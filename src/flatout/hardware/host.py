"""How busy cores, memory and disks are between two looks."""

import os
import time
from typing import Any

from flatout.core.live import LiveHost


class HostMeter:
    """Reads the host; rates are those since the reading before."""

    def __init__(self) -> None:
        self.before_s = time.monotonic()
        self.missing: dict[str, str] = {}
        self.disks = self._disks()
        self._cpu_share()  # the first answer is about nothing

    def read(self) -> LiveHost:
        """Return the host's state now."""
        self.missing = {}
        now_s, disks = time.monotonic(), self._disks()
        passed_s = max(now_s - self.before_s, 1e-3)
        read = written = None
        if disks and self.disks:
            read, written = ((disks[i] - self.disks[i]) / passed_s for i in range(2))
        self.before_s, self.disks = now_s, disks
        memory = self._memory()
        return LiveHost(
            cpu_share=self._cpu_share(),
            cores=os.cpu_count() or 1,
            memory_used_bytes=memory.total - memory.available if memory else None,
            memory_total_bytes=memory.total if memory else None,
            disk_read_bytes_per_s=read,
            disk_write_bytes_per_s=written,
            missing=self.missing,
        )

    def _cpu_share(self) -> float | None:
        import psutil

        try:
            return float(psutil.cpu_percent(interval=None)) / 100
        except (OSError, RuntimeError, psutil.Error) as error:  # no /proc/stat
            self.missing["cpu_share"] = str(error)
            return None

    def _memory(self) -> Any:
        import psutil

        try:
            return psutil.virtual_memory()
        except (OSError, RuntimeError, ValueError, psutil.Error) as error:
            self.missing["memory_used_bytes"] = str(error)
            return None

    def _disks(self) -> tuple[int, int] | None:
        """Return bytes read and written since the machine started, over all disks."""
        import psutil

        try:
            found = psutil.disk_io_counters()
        except (OSError, RuntimeError, psutil.Error) as error:
            self.missing["disk_read_bytes_per_s"] = str(error)
            return None
        if found is None:
            self.missing["disk_read_bytes_per_s"] = "the system lists no disk"
            return None
        return found.read_bytes, found.write_bytes
