"""Steps of which nothing but the end is noted, until one is looked into again.

Between two looks a step that was like the others leaves two numbers behind: the moment of its end,
and how many batches had been drawn. The segments are made of them when the rest is over, in one go,
which a short step feels far less than a record made in each: what runs once in a step finds its
code and data pushed out of the caches by the training, and takes five times as long.
"""

from typing import TYPE_CHECKING

from flatout.seams.clock import NAMES, OTHER
from flatout.seams.events import LoaderSeen, Segment

if TYPE_CHECKING:
    from flatout.seams.session import Session


TOLD_TOGETHER = 16
"""Segments of resting steps that wait at most to be told: each telling finds its listeners
cold in the caches, which is what a short step feels most."""


class Nap:
    """The resting steps since the last one that was recorded in full."""

    def __init__(self, session: "Session") -> None:
        self.session = session
        self.ends: list[float] = []
        self.drawn: list[int] = []
        """Batches drawn since the last full record, at each of those ends."""
        self.may_last = False
        self.began = 0.0
        self.changes = 0
        self.who = 0
        self.size = 0
        self.seen: LoaderSeen | None = None

    def begin(self) -> None:
        """Rest from now on, in full where every step's end is waited for: a device's clock is."""
        session = self.session
        clock = session.clock
        self.may_last = len(clock.stack) == 1 and not session.listeners["lap"]
        self.began, self.changes = clock.since, clock.changes
        self.who = next(iter(session.counts))
        seen = session.loaders.get(session.last_loader)
        if self.seen is None or (seen is not None and seen.is_training):
            self.seen, self.size = seen, session.last_size  # not those of an evaluation just now

    def noted(self) -> bool:
        """Note the end of a step; return False where it is to be recorded in full.

        That is each of so many, and one in which anything but training happened: evaluation, saving
        and the start of an epoch all change the clock's phase.
        """
        session = self.session
        clock = session.clock
        if clock.changes != self.changes or not self.may_last or len(self.ends) == TOLD_TOGETHER:
            return False
        # No phase has changed: all the time since then is this step's.
        clock.since = clock.now()
        self.ends.append(clock.since)
        self.drawn.append(session.drawn)
        signs = session.signs
        signs[0] = (signs[0] + 1) % 256  # as `Session.beat` does
        session.rest_left -= 1
        if not session.rest_left:
            session.segment.is_whole = True
            session.fire("look")
        return True

    def segments(self) -> list[Segment]:
        """Return the segments of the noted steps, and take them out of the running one."""
        session = self.session
        found, since, before = [], self.began, 0
        for end, drawn in zip(self.ends, self.drawn, strict=True):
            seconds = [0.0] * len(NAMES)
            seconds[OTHER] = end - since
            batches = drawn - before
            found.append(
                Segment(
                    who=self.who,
                    is_whole=False,
                    seconds=seconds,
                    end=end,
                    batches=batches,
                    samples=batches * self.size,
                )
            )
            since, before = end, drawn
        session.drawn -= before
        if self.seen is not None:
            self.seen.batches += before
        self.ends, self.drawn, self.began = [], [], since
        return found

    def turn_to(self, seen: LoaderSeen | None, size: int) -> None:
        """Batches come from another loader, or in a new epoch, from now on."""
        self.session.wake()
        self.fill(self.session.segment)
        self.seen, self.size = seen, size

    def fill(self, segment: Segment) -> None:
        """Count in a resting step that is recorded in full what draws leave out."""
        session, drawn = self.session, self.session.drawn
        session.drawn = 0
        segment.batches += drawn
        segment.samples += drawn * self.size
        if self.seen is not None:
            self.seen.batches += drawn
