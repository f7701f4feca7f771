"""Drain the training loader at full speed, in the training process, with nothing else running.

When the steps of the pass are over, one more iterator of each training loader is made and drained
for a bounded time: what the loader could give if no one else used the cores.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from flatout.agent import patching
from flatout.agent.hooks.loader import ADDRESS
from flatout.agent.measuring.batch_making import dataloader
from flatout.agent.samples import samples_of
from flatout.agent.session import Session

MAX_S = 4.0
"""Long enough for a rate of a few percent, short alongside the other passes."""
MAX_BATCHES = 400


def start(session: Session, options: Mapping[str, Any]) -> "LoaderAlone":
    """Watch which loaders train; `max_s` and `max_batches` in the options bound the draining."""
    probe = LoaderAlone(
        session, options.get("max_s", MAX_S), options.get("max_batches", MAX_BATCHES)
    )
    patching.wrap(dataloader.DataLoader, "_get_iterator", probe.noting)
    return probe


class LoaderAlone:
    """The loaders of this process by address, and how to make their iterators."""

    def __init__(self, session: Session, max_s: float, max_batches: int) -> None:
        self.session = session
        self.max_s = max_s
        self.max_batches = max_batches
        self.loaders: dict[str, Any] = {}
        self.iterators: list[weakref.ref[Any]] = []

    def noting(self, make: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return the making of an iterator, with its loader noted."""
        self.make = make

        @functools.wraps(make)
        def make_noted(loader: Any) -> Any:
            iterator = make(loader)
            if self.session.is_mine():
                self.loaders[loader.__dict__.get(ADDRESS, "")] = loader
                self.iterators.append(weakref.ref(iterator))
            return iterator

        return make_noted

    def result(self) -> Mapping[str, Any]:
        """Drain the training loaders, one after the other: by address when how much came."""
        self._end_workers()
        return {
            "loaders": {
                address: self.drain(loader)
                for address, loader in self.loaders.items()
                if address in self.session.loaders and self.session.loaders[address].is_training
            }
        }

    def drain(self, loader: Any) -> Mapping[str, Any]:
        """Return the seconds since the start at which batches came, and their samples."""
        now = self.session.clock.now
        began = now()
        times_s: list[float] = []
        samples: list[int] = []
        iterator = self.make(loader)
        for batch in itertools.islice(iterator, self.max_batches):
            times_s.append(now() - began)
            samples.append(samples_of(iterator, batch, loader.batch_size))
            if times_s[-1] > self.max_s:
                break
        # What was prefetched while the workers started came for free.
        ahead = int(loader.num_workers * (loader.prefetch_factor or 0))
        return {"times_s": times_s, "samples": samples, "ahead": ahead}

    def _end_workers(self) -> None:
        """End the workers of the training's own iterators: the run is over when this is called."""
        for reference in self.iterators:
            shut_down = getattr(reference(), "_shutdown_workers", None)
            if shut_down is not None:
                shut_down()
