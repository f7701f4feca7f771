"""Ask the kernel for bytes before they are needed: `posix_fadvise(WILLNEED)`, also in a thread.

The advice starts reads that nobody waits for; when a worker reads the file its pages are there.
"""

import contextlib
import mmap
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

CAN_ADVISE = hasattr(os, "posix_fadvise")
PIECE_BYTES = 128 << 10
"""Asked for in one call. Linux silently leaves out what is beyond the device's own read-ahead
(`force_page_cache_ra` in mm/readahead.c): 128 KiB on most disks and network shares."""

Ask: TypeAlias = Callable[[Sequence[int]], int]
"""Asks for what the samples of these numbers will read; returns of how many it could."""


def ask(descriptor: int, begin: int, end: int) -> None:
    """Ask for these bytes of an open file, however many."""
    for at in range(begin - begin % mmap.PAGESIZE, end, PIECE_BYTES):
        os.posix_fadvise(descriptor, at, min(PIECE_BYTES, end - at), os.POSIX_FADV_WILLNEED)


def advise(path: str) -> bool:
    """Ask for a file's pages; False where it cannot be opened: whoever needs it will say so."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        ask(descriptor, 0, os.fstat(descriptor).st_size)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def asking_files(find_file: Callable[[int], str | None]) -> Ask:
    """Return what asks for the files of samples."""

    def ask_files(numbers: Sequence[int]) -> int:
        asked = 0
        for number in numbers:
            with contextlib.suppress(Exception):
                path = find_file(number)
                asked += bool(path and advise(path))
        return asked

    return ask_files


class Ahead:
    """A thread that asks for what samples to come will read."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.waiting: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.asked = 0
        threading.Thread(target=self._work, name="flatout-read-ahead", daemon=True).start()

    def want(self, numbers: Any) -> None:
        """Queue the samples of one batch."""
        self.waiting.put(numbers)

    def close(self) -> None:
        """Let the thread end."""
        self.waiting.put(None)

    def _work(self) -> None:
        while (numbers := self.waiting.get()) is not None:
            batch = numbers if isinstance(numbers, Iterable) else (numbers,)
            with contextlib.suppress(Exception):
                self.asked += self.ask([int(number) for number in batch])


def looking_ahead(
    batches: Iterator[Any], want: Callable[[Any], None], depth: int, close: Callable[[], None]
) -> Iterator[Any]:
    """Return the same batches of numbers; each is announced `depth` batches before it comes."""
    ready: deque[Any] = deque()
    try:
        for numbers in batches:
            want(numbers)
            ready.append(numbers)
            if len(ready) > depth:
                yield ready.popleft()
        while ready:
            yield ready.popleft()
    finally:
        close()
