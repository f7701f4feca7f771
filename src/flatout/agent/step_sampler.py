"""Steps of which nothing but the end is noted, until one is looked into again.

Between two looks a step that was like the others leaves two numbers behind: the moment of its end,
and how many batches had been drawn. The segments are made of them when the rest is over, in one go,
which a short step feels far less than a record made in each: what runs once in a step finds its
code and data pushed out of the caches by the training, and takes five times as long.

How often a step is looked into: with short ones the looking itself would be what is measured.

Around short steps the hook points rest most of the time. Of a resting step its end is listened
to, its batches, and the roots' calls, where an evaluation shows; its phases and other counts are
those of the steps alongside it that were looked into, which are drawn at random so that nothing
periodic in a script falls between them.
"""

import itertools
import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.agent.session import Session
from flatout.agent.events import LoaderSeen, Segment
from flatout.records.phase_clock import NAMES, OTHER

FROM = 12
"""Segments before the first rest: the roots are known by then and the first costs are over."""
SHORT_S = 0.05
"""Steps below this rest: listening takes 70 us of a step in warm caches and 0.3 ms where the
training has taken the caches for itself, which is 1 % of a step of 30 ms."""
LOOK_EVERY_S = 0.3
"""Time between two looks, about: one takes up to 0.6 ms in caches that the training has taken."""
FEWEST, MOST = 3, 14
"""Steps between two looks, on average: so many at least and at most, however long one is."""
AROUND = (-1, 0, 1)
"""Drawn with equal chances and added to the steps between two looks."""
LATEST = 5
"""Segments whose median says how long a step is now."""
PERIOD_OF_DRAWS = 509
"""Gaps drawn before they come again; prime, as no script's own period is."""
ALONE = ("batch", "forward", "before_step", "after_step", "backward_end")
"""Events that must have no listener: what listens there wants every step."""


class Pace:
    """Decides after each step that was looked into how many follow that are not."""

    def __init__(self, session: "Session", below_s: float) -> None:
        self.session = session
        self.below_s = below_s
        draws = random.Random(0)
        self.draws = itertools.cycle([draws.choice(AROUND) for _ in range(PERIOD_OF_DRAWS)])
        self.in_burst = 0

    def rest(self) -> int:
        """Return the number of segments to rest from now on."""
        session = self.session
        if len(session.segments) < FROM or not self._may_rest():
            return 0
        walls = sorted(sum(segment.seconds) for segment in session.segments[-LATEST:])
        step_s = walls[len(walls) // 2]
        if step_s >= self.below_s:
            return 0
        self.in_burst += 1
        # Batches come from workers in bursts, one of each: so many steps make one look.
        burst = self._workers()
        if self.in_burst < burst:
            return 0
        self.in_burst = 0
        steps = min(max(round(LOOK_EVERY_S / max(step_s, 1e-6)), FEWEST), MOST)
        return burst * (steps + next(self.draws))

    def _may_rest(self) -> bool:
        """Return whether one step is like the other, and no one waits for each."""
        session = self.session
        if session.is_marked or session.techniques or len(session.counts) != 1:
            return False
        if min(session.counts) < 0:
            return False  # no optimizer: backward ends the steps
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return False  # what a step waits for other ranks is told apart by its phases
        return not any(session.listeners[event] for event in ALONE)

    def _workers(self) -> int:
        seen = self.session.loaders.get(self.session.last_loader)
        return max(1, int(seen.asked.get("effective_workers") or 1)) if seen else 1


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
