"""What Python's garbage collector takes of a training."""

import gc
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatout.seams.session import Session


class GarbageClock:
    """Adds up the collector's time in the training thread, from the first finished step on."""

    def __init__(self, session: "Session") -> None:
        self.seconds = 0.0
        self._session = session
        self._since: float | None = None

    def install(self) -> None:
        """Listen from now on; a collection costs two readings of the clock more."""
        gc.callbacks.append(self._saw)

    def _saw(self, phase: str, _: dict[str, Any]) -> None:
        session = self._session
        if phase == "start":
            is_counted = bool(session.segments) and session.is_mine()
            self._since = session.clock.now() if is_counted else None
        elif self._since is not None:
            self.seconds += session.clock.now() - self._since
            self._since = None
