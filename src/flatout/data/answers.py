"""Answers about a data set that are found once and given at each epoch, refusals included."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flatout.core.errors import NotApplicable

Found = TypeVar("Found")
ALIKE = 2
"""Sets of one class and length that are known at a time. A script that builds its set anew for each
epoch would otherwise have all of them, and what is kept for each, in memory."""


class Answers(Generic[Found]):
    """What was found for each data set, by its identity; the set is held so that it keeps its own.

    A lever that refuses a loader is asked again at each epoch: it then gives the reason that it had
    when the loader was made, and not another one.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Found | NotApplicable]] = {}

    def find(self, dataset: Any, look: Callable[[], Found]) -> Found:
        """Return what was found, looking the first time.

        Raises:
            NotApplicable: what looking raised, now or then.
        """
        if id(dataset) not in self._known:
            self._forget_like(dataset)
            try:
                answer: Found | NotApplicable = look()
            except NotApplicable as reason:
                answer = reason
            self._known[id(dataset)] = (dataset, answer)
        return self.known(dataset)

    def known(self, dataset: Any) -> Found:
        """Return what was found earlier.

        Raises:
            NotApplicable: what looking raised, or because nobody looked.
        """
        _, answer = self._known.get(id(dataset), (None, NotApplicable(UNSEEN)))
        if isinstance(answer, NotApplicable):
            raise NotApplicable(str(answer))
        return answer

    def _forget_like(self, dataset: Any) -> None:
        """Make room for a set: the oldest of its kind are known no more."""
        alike = [key for key, (known, _) in self._known.items() if _kind(known) == _kind(dataset)]
        for key in alike[: len(alike) - ALIKE + 1]:
            del self._known[key]

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


def _kind(dataset: Any) -> tuple[type, int]:
    """Return what a set has in common with the one that a script builds in its place."""
    try:
        return type(dataset), len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return type(dataset), -1


UNSEEN = "the loader was made before the lever could see its data set"
