"""Sample a few of the short steps in detail, and note only the end of the others.

Listening at every hook point takes 70 us of a step in warm caches, and 0.3 ms where the training
has taken the caches for itself: of a short step too much. So short steps have a duty cycle. A
sampled step is recorded in full. Of a skipped one only its end, its batches and the roots' calls
(where an evaluation shows) are listened to; its phases and counts are taken to be those of the
sampled steps around it. The gaps between samples are random, so that nothing periodic in a script
falls between them.

A skipped step that was like the others leaves two numbers: the moment of its end, and how many
batches had been drawn. Segments are made of them later, all at once: what runs once per step finds
its code and data pushed out of the caches by the training, and takes five times as long.
"""

import itertools
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flatout.records.phase_clock import NAMES, OTHER
from flatout.records.trial_result import LoaderSeen, Segment

if TYPE_CHECKING:
    from flatout.agent.session import Session

SHORT_STEP_S = 0.05
"""Below this most steps are skipped: 0.3 ms for listening is 1 % of a step of 30 ms."""
ALL_AT_FIRST = 12
"""Steps before the first skipped one: the roots are known by then and first costs are over."""
SAMPLE_EVERY_S = 0.3
"""Time between two samples, about."""
MIN_SKIPPED, MAX_SKIPPED = 3, 14
"""Bounds of the mean gap between two samples in steps, however long a step is."""
JITTER = (-1, 0, 1)
"""Added to a gap with equal chances."""
JITTER_PERIOD = 509
"""Random numbers drawn before they repeat; prime, unlike a script's own period."""
LATEST = 5
"""Steps whose median says how long a step is now."""
MAX_NOTED = 16
"""Skipped steps until they are recorded and reported to listeners: each time finds the
listeners cold in the caches, which is what a short step feels most."""
EACH_STEP = ("batch", "forward", "before_step", "after_step", "backward_end")
"""Events whose listeners need every step, so that none is skipped."""


def nothing() -> None:
    """Lead to nothing, as a dead weak reference."""


class StepSampler:
    """Decides which steps are sampled, and holds the notes of those that are skipped."""

    skips_left = 0
    """Steps to skip, the running one included; 0 while steps are sampled."""
    drawn = 0
    """Batches drawn in skipped steps, which no segment has counted yet."""

    def __init__(self, session: "Session", below_s: float) -> None:
        self.session = session
        self.below_s = below_s
        self.jitter = itertools.cycle(random.Random(0).choices(JITTER, k=JITTER_PERIOD))
        self.sampled_in_a_row = 0
        self.ends: list[float] = []
        self.drawn_at: list[int] = []
        """Batches drawn since the last full record, at each of those ends."""
        self.may_note = False
        self.began = 0.0
        self.changes = 0
        self.who = 0
        self.size = 0
        self.seen: LoaderSeen | None = None
        self.source: Callable[[], Any] = nothing
        """Leads to the iterator that gave the latest batch; `seen` is its loader, `size` what the
        batch held. While steps are skipped, only batches of another one are looked into."""

    def reset(self) -> None:
        """Sample from now on, and drop what was noted of skipped steps."""
        self.ends, self.drawn_at, self.drawn = [], [], 0
        self.source, self.seen = nothing, None
        if self.skips_left:
            self.skips_left = 0
            self.session.segment.is_sampled = True
            self.session.fire("sampling")

    def recorded(self, segment: Segment) -> None:
        """Decide on the next step after one was recorded in full."""
        if self.skips_left:
            self._count_drawn(segment)
            # An unusual step does not end the gap: samples would then fall on epochs' starts.
            self.skips_left -= 1
            if not self.skips_left:
                self.session.fire("sampling")
        elif self.below_s:
            self.skips_left = self._gap()
            if self.skips_left:
                self.session.fire("skipping")
        if self.skips_left:
            self._start_noting(segment.who)

    def end_skipping(self) -> None:
        """Sample from the next step on: the one that ends is another training's first."""
        self.skips_left = min(self.skips_left, 1)

    def note_end(self) -> bool:
        """Note the end of a skipped step; return False where it has to be recorded in full.

        That is each of so many, and one in which anything but training happened: evaluation, saving
        and the start of an epoch all change the clock's phase.
        """
        session = self.session
        clock = session.clock
        if clock.changes != self.changes or not self.may_note or len(self.ends) == MAX_NOTED:
            return False
        # No phase has changed: all the time since then is this step's.
        clock.since = clock.now()
        self.ends.append(clock.since)
        self.drawn_at.append(self.drawn)
        signs = session.signs
        signs[0] = (signs[0] + 1) % 256  # `Session.beat`, without the call
        self.skips_left -= 1
        if not self.skips_left:
            session.segment.is_sampled = True
            session.fire("sampling")
        return True

    def take_noted(self) -> list[Segment]:
        """Return the segments of the noted steps, and take them out of the running one."""
        found, since, before = [], self.began, 0
        for end, drawn in zip(self.ends, self.drawn_at, strict=True):
            seconds = [0.0] * len(NAMES)
            seconds[OTHER] = end - since
            batches = drawn - before
            found.append(
                Segment(
                    who=self.who,
                    is_sampled=False,
                    seconds=seconds,
                    end=end,
                    batches=batches,
                    samples=batches * self.size,
                )
            )
            since, before = end, drawn
        self.drawn -= before
        if self.seen is not None:
            self.seen.batches += before
        self.ends, self.drawn_at, self.began = [], [], since
        return found

    def change_source(
        self, source: Callable[[], Any], seen: LoaderSeen | None = None, size: int = 0
    ) -> None:
        """Count the batches so far; later ones come from another iterator, or in a new epoch."""
        if self.drawn:
            self.session.record_noted()
            self._count_drawn(self.session.segment)
        self.source, self.seen, self.size = source, seen, size

    def _count_drawn(self, segment: Segment) -> None:
        drawn, self.drawn = self.drawn, 0
        segment.batches += drawn
        segment.samples += drawn * self.size
        if self.seen is not None:
            self.seen.batches += drawn

    def _start_noting(self, who: int) -> None:
        session = self.session
        clock = session.clock
        # A device's clock waits for every step's end.
        self.may_note = len(clock.stack) == 1 and not session.listeners["lap"]
        self.began, self.changes, self.who = clock.since, clock.changes, who

    def _gap(self) -> int:
        """Return the number of steps to skip from now on."""
        segments = self.session.segments
        if len(segments) < ALL_AT_FIRST or not self._may_skip():
            return 0
        walls = sorted(sum(segment.seconds) for segment in segments[-LATEST:])
        step_s = walls[len(walls) // 2]
        if step_s >= self.below_s:
            return 0
        self.sampled_in_a_row += 1
        # Workers deliver one batch each at about the same time: so many steps are one sample.
        workers = (
            int(seen.asked.get("effective_workers") or 1)
            for seen in self.session.loaders.values()
            if seen.is_training
        )
        burst = max([1, *workers])
        if self.sampled_in_a_row < burst:
            return 0
        self.sampled_in_a_row = 0
        steps = min(max(round(SAMPLE_EVERY_S / max(step_s, 1e-6)), MIN_SKIPPED), MAX_SKIPPED)
        return burst * (steps + next(self.jitter))

    def _may_skip(self) -> bool:
        """Return whether steps are alike and no listener needs each of them."""
        session = self.session
        places = session.places
        if session.is_marked or session.techniques:
            return False
        if len(places) > 1 and sum(map(session.lives, places)) != 1:
            return False  # several take turns; those of a training before this one are gone
        if min(places) < 0:
            return False  # no optimizer: backward ends the steps
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            return False  # only phases separate waiting for other ranks from computing
        return not any(session.listeners[event] for event in EACH_STEP)
