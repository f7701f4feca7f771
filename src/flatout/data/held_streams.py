"""The random number generators that samples and their collation draw from, beside the global ones.

A batch that is made a second time is to have the draws that the first time had.
"""

from contextlib import suppress
from typing import Any

from flatout.data.epoch_streams import generators_of, set_back
from flatout.data.reach import reached

LOOKS = 2
"""Batches before which it is looked: a data set may make its generator with its first sample."""


class HeldStreams:
    """The generators of a fetcher's data set and collation, and of the functions that these use."""

    def __init__(self, dataset: Any, collate: Any) -> None:
        self._sources = (dataset, collate)
        self._generators: dict[str, Any] = {}
        self._looks = 0
        self._noted: list[tuple[Any, Any]] = []
        self._held: list[tuple[dict[str, Any], dict[str, Any]]] = []
        """Attributes of what was looked at, as they are and as they were."""

    def note(self) -> None:
        """Note where the generators stand."""
        if self._looks < LOOKS:
            self._looks += 1
            self._generators = {str(place): one for place, one in enumerate(self._find())}
        else:
            self._held.clear()
        self._noted = generators_of(None, **self._generators)

    def set_back(self) -> None:
        """Put them to where they were noted last; those made since are made anew when asked for."""
        set_back(self._noted)
        for now, before in self._held:
            for name in [name for name in now if now[name] is not before.get(name)]:
                if not generators_of(None, one=now[name]):
                    continue
                if name in before:
                    now[name] = before[name]
                else:
                    del now[name]

    def _find(self) -> list[Any]:
        things: dict[str, Any] = {}
        found: list[tuple[Any, Any]] = []
        with suppress(Exception):  # what the script holds may raise anything where it is looked at
            things = {str(place): one for place, (_, one) in enumerate(reached(*self._sources))}
            attributes = (getattr(one, "__dict__", None) for one in things.values())
            self._held = [(one, dict(one)) for one in attributes if type(one) is dict]
            found = generators_of(self._sources[0], **things)
        return [generator for generator, _ in found]
