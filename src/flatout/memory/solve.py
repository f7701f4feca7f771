"""The largest batch that fits, and how to keep the global batch with smaller ones."""

from collections.abc import Callable
from dataclasses import dataclass

from flatout.core.plan import MAX_BATCH, LargestBatch
from flatout.memory.allocator_settings import AllocatorSettings
from flatout.memory.replay import Replay, replay
from flatout.memory.steady import NotSteadyError, repeated
from flatout.memory.stream import MemoryStream

MORE_STEPS = 2
"""Steps played after the traced ones: fragmentation shows from the third on, if at all."""

TOO_MUCH = Replay(peak_allocated=0, peak_reserved=0, peak_at=0, retries_by_step=(), full_at=0)
"""Stands for the replay of what cannot fit by its tensors alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """A global batch in equal micro-batches."""

    micro_batch: int
    steps: int


def steady_replay(
    stream: MemoryStream, settings: AllocatorSettings, capacity: int | None
) -> Replay:
    """Return the replay of the stream with a few more steps, where its last can be repeated."""
    try:
        stream = repeated(stream, MORE_STEPS)
    except NotSteadyError:
        return replay(stream, settings, capacity=capacity)
    return replay(stream, settings, capacity=capacity)


def largest_batch(
    at: Callable[[int], MemoryStream],
    capacity: int,
    settings: AllocatorSettings,
    *,
    most: int = MAX_BATCH,
) -> LargestBatch:
    """Return the largest batches that fit, without and with the allocator's retries.

    Args:
        at: the stream at a batch.
        capacity: bytes that the allocator may take of the device.
        settings: the allocator's.
        most: no larger batch is tried.
    """
    played = _remembered(at, capacity, settings)
    with_retries = _search(lambda batch: played(batch).fits, guessed_batch(at, capacity), most)
    without = _search(lambda batch: _is_steady(played(batch)), with_retries, with_retries)
    return LargestBatch(without_retries=without or None, with_retries=with_retries or None)


def largest_steady_batch(
    at: Callable[[int], MemoryStream], capacity: int, settings: AllocatorSettings
) -> int | None:
    """Return the largest batch that fits without retries, None where not even one sample does."""
    played = _remembered(at, capacity, settings)
    found = _search(lambda batch: _is_steady(played(batch)), guessed_batch(at, capacity), MAX_BATCH)
    return found or None


def guessed_batch(at: Callable[[int], MemoryStream], capacity: int) -> int:
    """Return about how many samples fit, from what is alive at two batches."""
    few, many = (max(at(batch).alive(), default=0) for batch in (8, 16))
    slope = (many - few) / 8
    if slope <= 0:
        return 1
    return max(1, min(MAX_BATCH, int(8 + (capacity - few) / slope)))


def accumulation(global_batch: int, largest: int) -> Accumulation | None:
    """Return the fewest equal micro-batches of at most `largest` samples; None if one is too many.

    >>> accumulation(64, 24)
    Accumulation(micro_batch=16, steps=4)
    >>> accumulation(64, 100)
    Accumulation(micro_batch=64, steps=1)
    """
    for micro_batch in range(min(global_batch, largest), 0, -1):
        if global_batch % micro_batch == 0:
            return Accumulation(micro_batch=micro_batch, steps=global_batch // micro_batch)
    return None


def _is_steady(played: Replay) -> bool:
    return played.fits and not played.steady_retries


def _remembered(
    at: Callable[[int], MemoryStream], capacity: int, settings: AllocatorSettings
) -> Callable[[int], Replay]:
    seen: dict[int, Replay] = {}

    def played(batch: int) -> Replay:
        if batch not in seen:
            stream = at(batch)
            # What is asked for is already too much: no need to play where it lies.
            is_hopeless = max(stream.alive(), default=0) > capacity
            seen[batch] = TOO_MUCH if is_hopeless else steady_replay(stream, settings, capacity)
        return seen[batch]

    return played


def _search(works: Callable[[int], bool], guess: int, most: int) -> int:
    """Return the largest number that works; 0 if not even 1 does. What works below is assumed.

    The search widens from the guess, so that a good one costs a few tries only.
    """
    if most < 1:
        return 0
    low, high = 0, most + 1
    number, stride = min(max(guess, 1), most), 1
    while low < number < high:
        if works(number):
            low, number = number, number + max(stride, number // 64)
        else:
            high, number = number, number - max(stride, number // 64)
        stride *= 2
        if low and high <= most:
            break
    while high - low > 1:
        middle = (low + high) // 2
        if works(middle):
            low = middle
        else:
            high = middle
    return low
