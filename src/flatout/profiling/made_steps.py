"""How many steps a running training has made, as its recorder asks while it runs."""

from collections.abc import Mapping, Sequence

from flatout.profiling.steps import groups_of
from flatout.seams.events import Segment

GROWTH = 1.15
"""Segments are grouped anew when there are this many times more: grouping a thousand takes a
millisecond, and the steps of a small model no longer."""


class MadeSteps:
    """Count the steps where optimizers take turns, and where they follow each other."""

    def __init__(self) -> None:
        self.grouped_at = 0
        self.in_sequence = 0
        """Steps of all trainings, where there is more than one so far."""

    def __call__(self, counts: Mapping[int, int], segments: Sequence[Segment]) -> tuple[int, int]:
        """Return the fewest and the most steps of an optimizer, both of all where they follow.

        Trainings one after the other have optimizers that are over and a last one that is young:
        neither tells how many steps there are.

        Args:
            counts: Segments by the optimizer that ended them.
            segments: Those that were recorded.
        """
        if len(counts) == 1:
            (made,) = counts.values()
            return made, made
        if len(segments) >= self.grouped_at:
            trainings = groups_of([{"who": each.who} for each in segments])
            self.in_sequence = sum(map(len, trainings)) if len(trainings) > 1 else 0
            self.grouped_at = int(len(segments) * GROWTH) + 1
        if self.in_sequence:
            return self.in_sequence, self.in_sequence
        return min(counts.values()), max(counts.values())
