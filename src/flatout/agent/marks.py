"""`flatout.step`: the script's own word on what one training step is. Standard library only."""

from collections.abc import Callable
from types import TracebackType


class StepMark:
    """A context that does nothing until a trial listens to it; it may be entered again."""

    __slots__ = ("_began", "_ended")

    def __init__(self) -> None:
        self._began: Callable[[], None] | None = None
        self._ended: Callable[[bool], None] | None = None

    def listen(self, began: Callable[[], None], ended: Callable[[bool], None]) -> None:
        """Call `began()` at every entry and `ended(is_whole)` at every exit."""
        self._began, self._ended = began, ended

    def __enter__(self) -> None:
        if self._began is not None:
            self._began()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._ended is not None:
            self._ended(kind is None)


STEP = StepMark()
"""The one mark of this process: there is no state outside a trial, so one is enough."""


def step() -> StepMark:
    """Return the context of one training step: `with flatout.step(): ...`.

    Inside a trial its exit ends the step, and nothing else does; what runs between two blocks,
    such as drawing the next batch, belongs to the step that follows. Outside it does nothing.

    >>> with step():
    ...     print("one update")
    one update
    """
    return STEP
