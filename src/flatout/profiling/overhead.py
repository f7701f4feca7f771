"""What listening costs: the wrappers' own time, measured in the process that used them."""

import time

from flatout.seams.clock import OTHER, Clock
from flatout.seams.session import Session

ROUNDS = 500


def listening_cost_s(session: Session) -> float:
    """Return the seconds per training step that the seams' own code took, estimated.

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
