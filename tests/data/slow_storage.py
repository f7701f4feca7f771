"""Slow storage on a clock of its own: it counts what is asked for and says how long that takes.

Each request costs a trip; its bytes come out of a bucket that fills at the storage's rate. What was
read once stays in a page cache. Nobody sleeps: times follow from the requests alone.
"""

import os
from pathlib import Path

import numpy as np

PAGE = 4096
REQUEST_PAGES = (1 << 20) // PAGE
"""The most that one request asks for: 1 MiB."""
AHEAD_PAGES = (128 << 10) // PAGE
"""What the kernel reads at once behind a reader that goes straight on."""


class SlowStorage:
    """A token bucket behind a network."""

    def __init__(self, *, trip_s, bytes_per_s, burst_bytes=1 << 20):
        self.trip_s, self.bytes_per_s, self.burst_bytes = trip_s, bytes_per_s, burst_bytes
        self.now_s, self.tokens = 0.0, float(burst_bytes)
        self.requests = self.bytes = 0
        self.cached = {}
        self.last_page = {}

    def read(self, path, begin, end):
        """Read bytes of a file that somebody waits for, more behind who goes straight on."""
        first, last = begin // PAGE, -(-end // PAGE)
        cached = self._pages(path)
        if cached[first:last].all():
            return
        missing = first + int(np.argmin(cached[first:last]))
        if missing == self.last_page.get(path, -1) + 1:
            last = max(last, missing + AHEAD_PAGES)
        self._ask(path, first, last)

    def read_ahead(self, path, begin, end):
        """Read bytes of a file that were asked for beforehand."""
        self._ask(path, begin // PAGE, -(-end // PAGE))

    def _pages(self, path):
        """Return which pages of a file lie in the cache."""
        if path not in self.cached:
            self.cached[path] = np.zeros(-(-Path(path).stat().st_size // PAGE), dtype=bool)
        return self.cached[path]

    def _ask(self, path, first, last):
        """Ask for what is not in the cache, runs of pages in one request each."""
        cached = self._pages(path)
        wanted = first + np.flatnonzero(~cached[first:last])
        for run in np.split(wanted, np.flatnonzero(np.diff(wanted) != 1) + 1):
            for start in range(0, len(run), REQUEST_PAGES):
                self._request(len(run[start : start + REQUEST_PAGES]) * PAGE)
        if len(wanted):
            self.last_page[path] = int(wanted[-1])
        cached[first:last] = True

    def _request(self, count):
        self.requests += 1
        self.bytes += count
        self._wait(self.trip_s)
        self._wait(max(0.0, count - self.tokens) / self.bytes_per_s)
        self.tokens -= count

    def _wait(self, seconds):
        self.now_s += seconds
        self.tokens = min(self.burst_bytes, self.tokens + seconds * self.bytes_per_s)


def put_before(monkeypatch, storage, *, store=None):
    """Let a storage see what is read of image files, and of a packed store."""
    from flatout.data.sources import folder

    plain_file = folder.read_file

    def read_file(path):
        storage.read(str(path), 0, path.stat().st_size)
        return plain_file(path)

    monkeypatch.setattr(folder, "read_file", read_file)
    if store is not None:
        _put_before_store(monkeypatch, storage, store)


def _put_before_store(monkeypatch, storage, store):
    paths = [str(store.folder / shard.name) for shard in store.header.shards]
    plain_record, plain_advise = type(store).record, os.posix_fadvise

    def record(self, place):
        shard, begin, end = (int(column[0]) for column in self.spans([place]))
        storage.read(paths[shard], begin, end)
        return plain_record(self, place)

    def advise(descriptor, begin, count, advice):
        if advice == os.POSIX_FADV_WILLNEED:
            storage.read_ahead(held(descriptor), begin, begin + count)
        return plain_advise(descriptor, begin, count, advice)

    def held(descriptor):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink())

    monkeypatch.setattr(type(store), "record", record)
    monkeypatch.setattr(os, "posix_fadvise", advise)
