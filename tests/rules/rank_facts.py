"""Made-up ranks for the tests of rules."""

from flatout.records.profile import PHASES
from flatout.records.readings import RankFacts


def rank(number, *, exposed_ms=5.0, backward=40.0, **changes):
    """Return a rank with a step of 100 ms."""
    phases_ms = dict.fromkeys(PHASES, 0.0) | {"backward": backward, "forward": 100.0 - backward}
    return RankFacts(
        rank=number,
        step_ms=100.0,
        phases_ms=phases_ms,
        samples_per_s=10.0,
        exposed_communication_ms=exposed_ms,
        **changes,
    )
