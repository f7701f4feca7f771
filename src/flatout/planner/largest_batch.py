"""The largest batch that fits, and how to keep the global batch with smaller ones.

`affine` takes two traces to any batch: sizes are a constant plus so much a sample.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from flatout.planner.allocator_settings import AllocatorSettings
from flatout.planner.replay import AllocatorReplay, replay
from flatout.records.memory_stream import Allocation, MemoryStream, NotSteadyError, repeated
from flatout.records.messages import words
from flatout.records.plan import MAX_BATCH, Accumulating, LargestBatch


class NotAffineError(Exception):
    """The two traces are not those of one computation at two batch sizes; says why."""


class Growth(NamedTuple):
    """What a further sample adds to the dims of an allocation, and to its operator's arguments."""

    shape: tuple[int, ...]
    arguments: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A stream whose sizes are known at every batch."""

    stream: MemoryStream
    """At `batch`."""
    batch: int
    slopes: tuple[int, ...]
    """Bytes a further sample adds to each allocation."""
    growth: tuple[Growth, ...]
    """What a further sample adds to the numbers of each allocation."""

    def at(self, batch: int) -> MemoryStream:
        """Return the stream at another batch."""
        more = batch - self.batch
        allocations = tuple(
            _grown(allocation, slope, growth, more)
            for allocation, slope, growth in zip(
                self.stream.allocations, self.slopes, self.growth, strict=True
            )
        )
        flops = self.stream.model_flops * batch / self.batch
        return replace(self.stream, allocations=allocations, batch=batch, model_flops=flops)

    @property
    def bytes_per_sample(self) -> int:
        """Growth of all allocations together; 0 where the batch changes nothing."""
        return sum(self.slopes)


def affine(first: MemoryStream, second: MemoryStream) -> Affine:
    """Return the stream at every batch, from traces at two.

    Frees come in another order now and then, because autograd has a thread of its own: births
    alone are compared, and the order of the first trace is kept.

    Raises:
        NotAffineError: if the traces differ in more than sizes, or sizes not by whole bytes.
    """
    one, other = first.batch, second.batch
    if one is None or other is None or one == other:
        raise NotAffineError(words("plan.two_batches"))
    pairs = _matched(first.allocations, second.allocations)
    step = other - one
    slopes, growth = [], []
    for before, after in pairs:
        slope, rest = divmod(after.size - before.size, step)
        if rest:
            about = {"one": str(one), "bytes": str(before.size), "other": str(other)}
            name = before.operator or words("plan.an_allocation")
            why = words("plan.no_whole_bytes", **about, name=name, more=str(after.size))
            raise NotAffineError(why)
        slopes.append(slope)
        arguments = zip(before.arguments, after.arguments, strict=True)
        growth.append(
            Growth(
                _slopes(before.shape, after.shape, step),
                tuple(_slopes(one, other, step) for one, other in arguments),
            )
        )
    return Affine(stream=first, batch=one, slopes=tuple(slopes), growth=tuple(growth))


def difference(expected: MemoryStream, traced: MemoryStream) -> tuple[int, int]:
    """Return how many sizes of a traced stream differ from the extrapolated ones, and of how many.

    Raises:
        NotAffineError: if they do not even hold the same allocations.
    """
    pairs = _matched(expected.allocations, traced.allocations)
    return sum(a.size != b.size for a, b in pairs), len(pairs)


def _slopes(one: Sequence[int], other: Sequence[int], step: int) -> tuple[int, ...]:
    return tuple((b - a) // step for a, b in zip(one, other, strict=False))


def _moved(numbers: Sequence[int], slopes: Sequence[int], more: int) -> tuple[int, ...]:
    return tuple(number + by * more for number, by in zip(numbers, slopes, strict=False))


def _grown(allocation: Allocation, slope: int, growth: Growth, more: int) -> Allocation:
    if not more or not (slope or allocation.arguments):
        return allocation
    # By hand, at half the time of `replace`: a search makes hundreds of thousands of them.
    return Allocation(
        size=max(0, allocation.size + slope * more),
        component=allocation.component,
        phase=allocation.phase,
        step=allocation.step,
        operator=allocation.operator,
        module=allocation.module,
        line=allocation.line,
        shape=_moved(allocation.shape, growth.shape, more),
        dtype=allocation.dtype,
        arguments=tuple(
            _moved(one, by, more)
            for one, by in zip(allocation.arguments, growth.arguments, strict=True)
        ),
    )


def _matched(
    first: Sequence[Allocation], second: Sequence[Allocation]
) -> list[tuple[Allocation, Allocation]]:
    pairs = list(zip(first, second, strict=False))
    for number, (one, other) in enumerate(pairs):
        if (one.operator, one.phase, one.step) != (other.operator, other.phase, other.step):
            of_one, of_other = (each.operator or words("plan.setup") for each in (one, other))
            why = words("plan.other_operator", n=str(number), one=of_one, other=of_other)
            raise NotAffineError(why)
    if len(first) != len(second):
        counts = {"one": str(len(first)), "other": str(len(second))}
        raise NotAffineError(words("plan.other_count", **counts))
    return pairs


MORE_STEPS = 2
"""Steps played after the traced ones: fragmentation shows from the third on, if at all."""

TOO_MUCH = AllocatorReplay(
    peak_allocated=0, peak_reserved=0, peak_at=0, retries_by_step=(), full_at=0
)
"""Stands for the replay of what cannot fit by its tensors alone."""


def steady_replay(
    stream: MemoryStream, settings: AllocatorSettings, capacity: int | None
) -> AllocatorReplay:
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
    own: int = 0,
) -> LargestBatch:
    """Return the largest batches that fit, without and with the allocator's retries.

    Args:
        at: the stream at a batch.
        capacity: bytes that the allocator may take of the device.
        settings: the allocator's.
        own: the script's batch, which is tried as well.
    """
    played = _remembered(at, capacity, settings)

    def largest(works: Callable[[int], bool], guess: int, most: int) -> int | None:
        found = _search(works, guess, most)
        return own if found < own <= most and works(own) else found or None

    with_retries = largest(lambda size: played(size).fits, guessed_batch(at, capacity), MAX_BATCH)
    highest = with_retries or 0
    without = largest(lambda size: _is_steady(played(size)), highest, highest)
    return LargestBatch(without_retries=without, with_retries=with_retries)


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


def fits_steadily(stream: MemoryStream, capacity: int, settings: AllocatorSettings) -> bool:
    """Return whether a stream fits without the allocator's retries."""
    return _is_steady(steady_replay(stream, settings, capacity))


def accumulation(
    global_batch: int, largest: int, fits: Callable[[int], bool] = lambda _: True
) -> Accumulating | None:
    """Return the fewest equal micro-batches of at most `largest` samples; None if one is too many.

    Each is asked about: a smaller batch may take more, where kernels choose a larger workspace.

    >>> accumulation(64, 24)
    Accumulating(micro_batch=16, steps=4)
    >>> accumulation(64, 24, lambda batch: batch != 16)
    Accumulating(micro_batch=8, steps=8)
    """
    for micro_batch in range(min(global_batch, largest), 0, -1):
        if global_batch % micro_batch == 0 and fits(micro_batch):
            return Accumulating(micro_batch=micro_batch, steps=global_batch // micro_batch)
    return None


def _is_steady(played: AllocatorReplay) -> bool:
    return played.fits and not played.steady_retries


def _remembered(
    at: Callable[[int], MemoryStream], capacity: int, settings: AllocatorSettings
) -> Callable[[int], AllocatorReplay]:
    seen: dict[int, AllocatorReplay] = {}

    def played(batch: int) -> AllocatorReplay:
        if batch not in seen:
            stream = at(batch)
            # What is asked for is already too much: no need to play where it is.
            is_hopeless = max(stream.alive(), default=0) > capacity
            seen[batch] = TOO_MUCH if is_hopeless else steady_replay(stream, settings, capacity)
        return seen[batch]

    return played


def _search(works: Callable[[int], bool], guess: int, most: int) -> int:
    """Return a number that works and is the largest where all below work; 0 if none was found.

    Memory does not grow with each sample: what is returned was tried itself, others were not. The
    search widens from the guess, so that a good one costs a few tries only.
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
