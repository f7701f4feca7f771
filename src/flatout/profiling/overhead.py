"""What listening costs, estimated: the wrappers' own time, taken in the process that used them."""

import time

from flatout.seams.clock import OTHER, Clock
from flatout.seams.session import Session

ROUNDS = 500
IN_A_TRAINING = 20.0
"""What listening costs in a training, over what its wrappers take in a tight loop: the training has
taken the caches for itself, and an event has more behind it than a change of phase. Paired runs
showed 0.69, 1.88 and 0.49 % of steps of 18, 1.8 and 83 ms (the records `overhead_fast` and
`overhead`) where the loop says 0.034, 0.080 and 0.034 %: 20, 23 and 15 times."""


def listening_cost_s(session: Session) -> float:
    """Return the seconds per training step that the seams' own code takes in a tight loop.

    Each change of phase goes through one wrapper: an identity check, two clock readings and an
    event. That is timed on a spare clock and multiplied by the changes counted in the run.
    """
    segments = max(1, len(session.segments))
    spare = Clock()
    heard = 0
    start = time.perf_counter()
    for _ in range(ROUNDS):
        if session.is_mine():
            spare.push(OTHER)
            spare.pop()
        heard += len(session.listeners["forward"])
    per_change_s = (time.perf_counter() - start) / ROUNDS
    return per_change_s * session.clock.changes / segments
