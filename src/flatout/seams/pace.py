"""How often a step is looked into: with short ones the looking itself would be what is measured.

Around short steps the seams rest most of the time. Of a resting step its end is listened to, its
batches, and the roots' calls, where an evaluation shows; its phases and other counts are those of
the steps beside it that were looked into, which are drawn at random so that nothing periodic in a
script falls between them.
"""

import itertools
import random
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flatout.seams.session import Session

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
        """Tell whether one step is like the other, and nobody waits for each."""
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
