"""Tell by page faults whether reads of mapped files wait for storage, and ask beforehand while so.

A mapped file is read page by page as it is touched: one request after the other, each of the size
that the kernel guesses. Asked for together, the records of a batch come in requests of their own
size, many under way at a time. In the page cache asking costs a tenth of reading and more: so one
batch in a while is not asked for, and its page faults say how it is.
"""

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

THREAD = getattr(resource, "RUSAGE_THREAD", None)
"""Linux counts the faults of one thread; elsewhere nothing is asked for."""
ASKED_BATCHES = 15
"""After a batch that waited, until one is looked at again: a sixteenth of the gain is given up."""


class ColdReads:
    """Asks for what a batch needs, as long as batches that are not asked for wait for storage."""

    def __init__(self) -> None:
        self.left = 0
        """Batches to ask for until one is looked at."""

    @contextmanager
    def asked_for(self, places: Any, will_need: Callable[[Any], None]) -> Iterator[None]:
        """Read the records of a batch inside; `will_need` asks for them."""
        if THREAD is None:
            yield
        elif self.left > 0:
            self.left -= 1
            will_need(places)
            yield
        else:
            before = resource.getrusage(THREAD).ru_majflt
            yield
            if resource.getrusage(THREAD).ru_majflt > before:
                self.left = ASKED_BATCHES
