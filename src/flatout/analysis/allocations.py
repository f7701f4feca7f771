"""From a stream of allocations to what was alive when memory was highest. Pure.

The stream of one step is a list of `Event`s in the order in which they happened. What they say of
an allocation may come after it: kernels allocate first, and only the finished operator shows its
tensors.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_TENSORS = 12
"""Tensors named at the peak; a reader looks at the first few."""
MAX_MODULES = 40
"""Modules kept; they are sorted, and what follows is small."""
MAX_POINTS = 400
"""Points of the plotted step: a plot is no wider."""
EARLIER = "earlier"
"""Phase of what was made before the observation: parameters, optimizer state."""
OWN = "flatout's own"
"""Kind of the losses that flatout keeps for its report: no leak of the script's."""


class AllocationSite(NamedTuple):
    """Where the training is."""

    phase: str
    module: str = ""
    line: str = ""


class AllocationLook(NamedTuple):
    """What an allocation holds."""

    shape: tuple[int, ...]
    dtype: str
    kind: str = ""
    """`parameter`, `buffer`, `gradient`, `optimizer state`; empty for what a step makes."""
    module: str = ""


class AllocationEvent(NamedTuple):
    """One event: an allocation (`size` above 0), its end (below 0), or a remark (0)."""

    at_ms: float
    address: int = 0
    size: int = 0
    place: AllocationSite | None = None
    """From here on the training is there."""
    look: AllocationLook | None = None
    """What is at the address."""
    ends_step: bool = False


@dataclass(slots=True)
class LiveBlock:
    """One allocation and what is known of it."""

    size: int
    place: AllocationSite
    step: int = 0
    look: AllocationLook | None = None


@dataclass(slots=True)
class AllocationBooks:
    """The running account of one training process over the observed steps."""

    alive: dict[int, LiveBlock] = field(default_factory=dict)
    tracked_bytes: int = 0
    older: tuple[LiveBlock, ...] = ()
    """What was allocated before anybody listened, as last counted."""
    older_bytes: int = 0
    step: int = 0
    by_phase: dict[str, int] = field(default_factory=dict)
    peak_bytes: int = 0
    peak_phase: str = ""
    peak_blocks: tuple[LiveBlock, ...] = ()
    timeline: list[tuple[float, int]] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    """Bytes left at the end of each observed step."""

    @property
    def now(self) -> int:
        """Bytes that are allocated."""
        return self.tracked_bytes + self.older_bytes


@dataclass(frozen=True, slots=True)
class StepEnd:
    """What is known at the end of a step alongside its events."""

    start: AllocationSite
    """Where the training was when the step began."""
    found: Mapping[int, LiveBlock]
    """What was alive at its end, by address."""
    total: int | None
    """What the allocator said is allocated, where it can be asked."""
    counts: bool
    """Whether the step is observed, or only brings the account up to date."""


def replay(events: Iterable[AllocationEvent], ends: Sequence[StepEnd]) -> AllocationBooks:
    """Return the account of the steps that have ended."""
    books = AllocationBooks()
    for step, end in zip(by_step(events), ends, strict=False):
        _enter_step(books, step, end)
        _close_step(books, end)
    return books


def by_step(events: Iterable[AllocationEvent]) -> Iterator[list[AllocationEvent]]:
    """Yield the events of each step, in milliseconds since its begin; not those of the last."""
    step: list[AllocationEvent] = []
    for event in events:
        if event.ends_step:
            yield [each._replace(at_ms=each.at_ms - step[0].at_ms) for each in step]
            step = []
        else:
            step.append(event)


def _enter_step(books: AllocationBooks, events: Iterable[AllocationEvent], end: StepEnd) -> None:
    """Enter the events of a step, in the order in which they happened."""
    place = end.start
    # Of each block when it was made and when it ended, by the place of the event.
    lives: dict[int, list[Any]] = {id(block): [block, -1, None] for block in books.alive.values()}
    points = [(0.0, books.now)]
    phases = [place.phase]
    for at, event in enumerate(events, start=1):
        place = event.place or place
        block = _enter(books, event, place)
        if event.size > 0:
            lives[id(block)] = [block, at, None]
        elif block is not None and event.size < 0:
            lives[id(block)][2] = at
        points.append((event.at_ms, books.now))
        phases.append(place.phase)
    if end.counts:
        _read(books, points, phases, lives.values())


def _enter(
    books: AllocationBooks, event: AllocationEvent, place: AllocationSite
) -> LiveBlock | None:
    """Enter one event and return the block that it is about."""
    if event.look is not None:
        found = books.alive.get(event.address)
        if found is not None and found.look is None:
            found.look = event.look
        return found
    if event.place is not None:
        return None
    books.tracked_bytes += event.size
    if event.size < 0:
        return books.alive.pop(event.address, None)
    block = books.alive[event.address] = LiveBlock(event.size, place, books.step)
    return block


def _read(
    books: AllocationBooks,
    points: Sequence[tuple[float, int]],
    phases: Sequence[str],
    lives: Iterable[Sequence[Any]],
) -> None:
    for phase, (_, now) in zip(phases, points, strict=True):
        books.by_phase[phase] = max(now, books.by_phase.get(phase, 0))
    highest = max(range(len(points)), key=lambda at: points[at][1])
    if points[highest][1] <= books.peak_bytes:
        return
    alive = [
        block for block, born, died in lives if born <= highest and (died is None or died > highest)
    ]
    books.peak_bytes, books.peak_phase = points[highest][1], phases[highest]
    books.peak_blocks = (*alive, *books.older)
    books.timeline = thinned(points)


def _close_step(books: AllocationBooks, end: StepEnd) -> None:
    """End a step with what is alive now; what is older than the books is known from there only."""
    older = [block for address, block in end.found.items() if address not in books.alive]
    known = sum(block.size for block in older)
    books.older = tuple(older)
    books.older_bytes = known if end.total is None else end.total - books.tracked_bytes
    for address, block in books.alive.items():
        seen = end.found.get(address)
        if seen is not None and seen.look is not None and seen.look.kind:
            block.look = seen.look
    if end.counts:
        own = sum(block.size for block in [*books.alive.values(), *older] if _is_own(block))
        books.ends.append(books.now - own)
    books.step += 1


def grown_by_line(books: AllocationBooks) -> dict[str, int]:
    """Return the bytes that earlier observed steps left behind, by the line that made them.

    What the very last step made is left out: the next one may well free it.
    """
    first = books.step - len(books.ends)
    grown: Counter[str] = Counter()
    for block in books.alive.values():
        if first <= block.step < books.step - 1 and not _is_own(block):
            grown[block.place.line] += block.size
    return dict(grown.most_common(MAX_TENSORS))


def summary(books: AllocationBooks) -> dict[str, Any]:
    """Return the account as plain values."""
    by_module: Counter[str] = Counter()
    for block in books.peak_blocks:
        by_module[_module_of(block)] += block.size
    largest = sorted(books.peak_blocks, key=lambda block: -block.size)[:MAX_TENSORS]
    return {
        "peak_bytes": books.peak_bytes,
        "peak_phase": books.peak_phase,
        "by_phase": books.by_phase,
        "by_module": dict(by_module.most_common(MAX_MODULES)),
        "largest": [_plain(block) for block in largest],
        "timeline": [list(point) for point in books.timeline],
        "ends": books.ends,
        "grown_by_line": grown_by_line(books),
    }


def _is_own(block: LiveBlock) -> bool:
    return block.look is not None and block.look.kind == OWN


def _module_of(block: LiveBlock) -> str:
    return (block.look.module if block.look else "") or block.place.module


def _plain(block: LiveBlock) -> dict[str, Any]:
    look = block.look or AllocationLook((), "")
    return {
        "bytes": block.size,
        "shape": list(look.shape),
        "dtype": look.dtype,
        "line": block.place.line,
        "phase": block.place.phase,
        "module": _module_of(block),
        "kind": look.kind,
    }


def thinned(points: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return at most `MAX_POINTS` points, the highest of each stretch.

    >>> thinned([(0.0, 1), (1.0, 5)])
    [(0.0, 1), (1.0, 5)]
    """
    stretch = -(-len(points) // MAX_POINTS)
    if stretch <= 1:
        return list(points)
    parts = (points[i : i + stretch] for i in range(0, len(points), stretch))
    return [max(part, key=lambda point: point[1]) for part in parts]
