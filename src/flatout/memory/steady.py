"""Make a stream of two steps one of many: what a training does from its second step on."""

from collections.abc import Sequence
from dataclasses import replace

from flatout.memory.edits import lives_of, step_bounds
from flatout.memory.stream import Allocation, Mark, MemoryStream, StreamEvent


class NotSteadyError(Exception):
    """The last traced step does not end as it began, so it cannot be repeated."""


def repeated(stream: MemoryStream, times: int) -> MemoryStream:
    """Return the stream with its last step played this many times more.

    What the last step leaves behind takes the place of what it found and freed: the gradients of
    the step before, the last loss.

    Raises:
        NotSteadyError: if the step leaves other sizes behind than it found.
    """
    last = stream.steps - 1
    start, end = step_bounds(stream, last)
    if last < 1 or start >= end:
        raise NotSteadyError("two traced steps are needed")
    successor = _successors(stream, start, end)
    allocations = list(stream.allocations)
    events = list(stream.events[:end])
    marks = [mark for mark in stream.marks if mark.at < end]
    pattern = stream.events[start:end]
    renamed = {index: index for index in range(len(allocations))}
    for turn in range(1, times + 1):
        for mark in stream.marks:
            if start <= mark.at < end:
                shift = len(events) - start
                marks.append(Mark(mark.at + shift, mark.phase, last + turn))
        renamed = _play(pattern, allocations, events, renamed, successor)
    return replace(
        stream,
        allocations=tuple(allocations),
        events=events,
        marks=tuple(marks),
        steps=stream.steps + times,
    )


def _play(
    pattern: Sequence[StreamEvent],
    allocations: list[Allocation],
    events: list[StreamEvent],
    renamed: dict[int, int],
    successor: dict[int, int],
) -> dict[int, int]:
    """Append one more turn; return which allocation of it stands for which of the pattern."""
    now: dict[int, int] = {}
    for index, born in pattern:
        if born:
            now[index] = len(allocations)
            allocations.append(allocations[index])
            events.append(StreamEvent(now[index], born=True))
        elif index in now:
            events.append(StreamEvent(now[index], born=False))
        else:
            events.append(StreamEvent(renamed[successor[index]], born=False))
    return {**renamed, **now}


def _successors(stream: MemoryStream, start: int, end: int) -> dict[int, int]:
    """Return for each allocation that the step found and freed the one it leaves in its place."""
    lives = lives_of(stream)
    found = [
        index
        for index, life in enumerate(lives)
        if life.birth < start and life.death is not None and start <= life.death < end
    ]
    left = [
        index
        for index, life in enumerate(lives)
        if start <= life.birth < end and (life.death is None or life.death >= end)
    ]
    found.sort(key=lambda index: lives[index].birth)
    left.sort(key=lambda index: lives[index].birth)
    sizes = [stream.allocations[index].size for index in found]
    if sizes != [stream.allocations[index].size for index in left]:
        raise NotSteadyError("the last traced step leaves other sizes behind than it found")
    return dict(zip(found, left, strict=True))
