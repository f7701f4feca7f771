"""The steps of a training that runs: each is put together once, however often one looks at them."""

from collections.abc import Sequence
from typing import Any

from flatout.profiling.steps import Row, Step, steps_of
from flatout.seams.events import Segment


class StepsSoFar:
    """Keeps what earlier looks found; a look costs what is new, and little for the rest.

    Putting a step together takes 10 us. Where each look, a few steps after the last, did it for all
    steps so far, that would be 80 us of every step.
    """

    def __init__(self) -> None:
        self.first: Segment | None = None
        """Begin anew when it changes: the script's own marks forget what came before them."""
        self.rows: list[Row] = []
        self.singles: list[Step] = []

    def of(self, segments: Sequence[Segment]) -> Sequence[Step]:
        """Return the training steps of the segments, without their losses."""
        first = segments[0] if segments else None
        if first is not self.first or len(segments) < len(self.rows):
            self.first, self.rows, self.singles = first, [], []
        self.rows += rows_of(segments[len(self.rows) :])
        who = self.rows[0]["who"] if self.rows else 0
        if any(row["who"] != who for row in self.rows):
            return steps_of(self.rows)
        # One optimizer: each segment is a step.
        self.singles += steps_of(self.rows[len(self.singles) :])
        return self.singles


def rows_of(segments: Sequence[Segment], *, with_losses: bool = False) -> list[dict[str, Any]]:
    """Return segments as plain mappings; reading losses waits for the device."""
    return [
        {
            "who": s.who,
            "is_whole": s.is_whole,
            "seconds": s.seconds,
            "end": s.end,
            "batches": s.batches,
            "samples": s.samples,
            "forwards": s.forwards,
            "calls": s.calls,
            "backwards": s.backwards,
            "evals": s.evals,
            "loader_starts": s.loader_starts,
            "communication": s.communication,
            "losses": [float(x) for x in s.losses] if with_losses else [],
        }
        for s in segments
    ]
