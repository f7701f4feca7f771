"""Answers about a data set that are found once and given at each epoch, refusals included."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from flatout.core.errors import NotApplicable

Found = TypeVar("Found")


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

    def clear(self) -> None:
        """Forget everything."""
        self._known.clear()


UNSEEN = "the loader was made before the lever could see its data set"
