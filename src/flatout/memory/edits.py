"""Change an allocation stream: sizes, births and deaths, what is added, what is left out."""

from bisect import bisect_left
from dataclasses import dataclass, replace

from flatout.memory.stream import Allocation, Mark, MemoryStream, Phase, StreamEvent

Place = tuple[int, int, int]
"""An event's position in the old stream, 0 for what goes before it, and the order of adding."""


@dataclass(frozen=True, slots=True)
class Life:
    """Positions of an allocation's birth and death among the events; None for one that stays."""

    birth: int
    death: int | None


def lives_of(stream: MemoryStream) -> list[Life]:
    """Return when each allocation is born and when it dies."""
    births: dict[int, int] = {}
    deaths: dict[int, int] = {}
    for position, event in enumerate(stream.events):
        (births if event.born else deaths)[event.index] = position
    return [
        Life(births.get(index, 0), deaths.get(index)) for index in range(len(stream.allocations))
    ]


def step_bounds(stream: MemoryStream, step: int) -> tuple[int, int]:
    """Return the positions between which a step's events lie."""
    starts = [mark.at for mark in stream.marks if mark.step == step and mark.phase != Phase.SETUP]
    later = [mark.at for mark in stream.marks if mark.step > step]
    return min(starts, default=len(stream.events)), min(later, default=len(stream.events))


class Draft:
    """An allocation stream that is being changed; `build` returns the new one."""

    def __init__(self, stream: MemoryStream) -> None:
        self.stream = stream
        self.lives = lives_of(stream)
        self._allocations = list(stream.allocations)
        self._births: dict[int, Place | None] = {
            index: (life.birth, 1, 0) for index, life in enumerate(self.lives)
        }
        self._deaths: dict[int, Place | None] = {
            index: None if life.death is None else (life.death, 1, 0)
            for index, life in enumerate(self.lives)
        }
        self._count = 0

    def resize(self, index: int, size: int) -> None:
        """Give an allocation another size."""
        self._allocations[index] = replace(self._allocations[index], size=max(0, size))

    def drop(self, index: int) -> None:
        """Leave an allocation out."""
        self._births[index] = self._deaths[index] = None

    def die_before(self, index: int, position: int | None) -> None:
        """Let an allocation die right before this event of the old stream; None lets it stay."""
        self._deaths[index] = None if position is None else self._before(position)

    def add(self, allocation: Allocation, birth: int, death: int | None) -> None:
        """Add an allocation that lives from before one event of the old stream to another."""
        index = len(self._allocations)
        self._allocations.append(allocation)
        self._births[index] = self._before(birth)
        self._deaths[index] = None if death is None else self._before(death)

    def build(self, *notes: str) -> MemoryStream:
        """Return the changed stream; notes say what was changed."""
        places: list[tuple[int, int, int, int, bool]] = []
        for index, birth in self._births.items():
            if birth is None:
                continue
            places.append((*birth, index, True))
            death = self._deaths[index]
            if death is not None:
                places.append((*death, index, False))
        places.sort()
        kept = [index for index, birth in self._births.items() if birth is not None]
        number = {index: position for position, index in enumerate(kept)}
        return replace(
            self.stream,
            allocations=tuple(self._allocations[index] for index in kept),
            events=[StreamEvent(number[place[3]], place[4]) for place in places],
            marks=tuple(
                Mark(bisect_left(places, (mark.at, 0, 0)), mark.phase, mark.step)
                for mark in self.stream.marks
            ),
            notes=(*self.stream.notes, *notes),
        )

    def _before(self, position: int) -> Place:
        self._count += 1
        return position, 0, self._count
