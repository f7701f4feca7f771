"""One exclusive clock of phases: at any moment exactly one phase is running.

Entering a hook point pushes its phase, leaving pops it, and time goes to the top only; so the
phases add up to the wall time, and a closure inside `optimizer.step()` gives forward and
backward their own.
"""

import time
from collections.abc import Callable

DATA_WAIT, FORWARD, BACKWARD, OPTIMIZER, OTHER, EVAL, SAVE = range(7)
NAMES = ("data_wait", "forward", "backward", "optimizer", "other", "eval", "save")
"""Names of the phases the clock keeps. `eval` and `save` never belong to a training step."""
OF_MODELS = frozenset({FORWARD, BACKWARD, EVAL})
"""In these a model's call is no outermost one."""


class Clock:
    """The running phase and the time per phase since the last lap.

    >>> ticks = iter([0.0, 1.0, 4.0, 5.0])
    >>> clock = Clock(lambda: next(ticks))
    >>> clock.push(FORWARD); clock.pop(); clock.lap()[FORWARD]
    3.0
    """

    __slots__ = ("_mark", "changes", "now", "since", "stack", "totals")

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.now = now
        self.stack = [OTHER]
        self.totals = [0.0] * len(NAMES)
        self.since = now()
        self.changes = 0
        self._mark: Callable[[int], None] | None = None

    def push(self, phase: int) -> None:
        """Start a phase inside the running one."""
        moment = self.now()
        self.totals[self.stack[-1]] += moment - self.since
        self.since = moment
        self.changes += 1
        self.stack.append(phase)
        if self._mark is not None:
            self._mark(phase)

    def pop(self) -> None:
        """Go back to the phase that ran before."""
        moment = self.now()
        self.totals[self.stack.pop()] += moment - self.since
        self.since = moment
        if self._mark is not None:
            self._mark(self.stack[-1])

    def give(self, phase: int, began: float) -> None:
        """Give a phase the time since a moment, which was no change of phase."""
        self.totals[self.stack[-1]] += began - self.since
        self.since = self.now()
        self.totals[phase] += self.since - began
        self.changes += 1

    def lap(self) -> list[float]:
        """Return the seconds per phase since the last lap and start again."""
        moment = self.now()
        self.totals[self.stack[-1]] += moment - self.since
        self.since = moment
        totals, self.totals = self.totals, [0.0] * len(NAMES)
        return totals

    def mark_with(self, mark: Callable[[int], None] | None) -> None:
        """Call `mark(phase)` at every change of phase: the device's clock listens here."""
        self._mark = mark
