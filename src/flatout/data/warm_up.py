"""Bring all files of a data set into the page cache before they are needed, if they fit.

A thread asks the kernel for one stretch of files after the other and waits until the last of it has
come: what workers read meanwhile does not queue behind the whole set.
"""

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from flatout.core.units import format_bytes
from flatout.data.ahead import advise
from flatout.data.residency import resident_share
from flatout.data.room import free_memory_bytes

MEMORY_SHARE = 0.5
"""Of the memory that is free at the beginning; the rest is for the training and its workers."""
STRETCH_BYTES = 64 * 1024**2
"""Asked for at a time: a second of a slow disk's work."""
THERE = 0.9
"""Share of a file in memory from which on it counts as read."""
LONGEST_WAIT_S = 10.0
"""For one stretch; then the next one is asked for all the same."""
POLL_S = 0.02


class WarmUp:
    """A thread that brings files into the page cache.

    Args:
        list_files: Called in the thread: names may be many.
    """

    def __init__(self, list_files: Callable[[], Iterable[Path]]) -> None:
        self.list_files = list_files
        self.asked_bytes = 0
        """Of the files that were asked for so far."""
        self.trouble = ""
        """Why nothing is asked for; empty if nothing is in the way."""
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="flatout-warm-up", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ask for no more files."""
        self._is_over.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until all files were asked for."""
        self._thread.join()

    def _work(self) -> None:
        try:
            sizes = self._sizes()
            needed, room = sum(sizes.values()), MEMORY_SHARE * free_memory_bytes()
            if needed > room:
                self.trouble = (
                    f"the files of the data set take {format_bytes(needed)}, more than "
                    f"{MEMORY_SHARE:.0%} of the free memory ({format_bytes(room)}): they were not "
                    "asked for beforehand"
                )
                return
            self._ask(sizes)
        except Exception as error:  # noqa: BLE001  a data set's own list may raise anything
            self.trouble = f"the files were not all asked for: {type(error).__name__}: {error}"

    def _sizes(self) -> dict[Path, int]:
        sizes = {}
        for path in self.list_files():
            if self._is_over.is_set():
                return {}
            try:
                sizes[path] = path.stat().st_size
            except OSError:
                continue  # whoever needs it will say so
        return sizes

    def _ask(self, sizes: dict[Path, int]) -> None:
        stretch = 0
        for path, size in sizes.items():
            if self._is_over.is_set():
                return
            if not advise(str(path)):
                continue
            self.asked_bytes += size
            stretch += size
            if stretch >= STRETCH_BYTES:
                self._await(path)
                stretch = 0

    def _await(self, path: Path) -> None:
        """Wait until a file is in memory, as far as that can be told."""
        until = time.monotonic() + LONGEST_WAIT_S
        while not self._is_over.is_set() and time.monotonic() < until:
            share = resident_share([path])
            if share is None or share >= THERE:
                return
            time.sleep(POLL_S)
