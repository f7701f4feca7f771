"""Ask the kernel for files before they are needed: `posix_fadvise(WILLNEED)` in a thread.

The advice starts reads that nobody waits for; when a worker opens the file its pages are there.
"""

import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

CAN_ADVISE = hasattr(os, "posix_fadvise")


def advise(path: str) -> bool:
    """Ask for a file's pages; False where it cannot be opened: whoever needs it will say so."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


class Ahead:
    """A thread that asks for the files of samples to come."""

    def __init__(self, find_file: Callable[[int], str | None]) -> None:
        self.find_file = find_file
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
            for number in numbers if isinstance(numbers, Iterable) else (numbers,):
                with contextlib.suppress(Exception):
                    path = self.find_file(int(number))
                    self.asked += bool(path and advise(path))


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
