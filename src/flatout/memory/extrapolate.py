"""From two traces to any batch: every size is a constant plus so much a sample."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from flatout.memory.stream import Allocation, MemoryStream


class NotAffineError(Exception):
    """The two traces are not those of one computation at two batch sizes; says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affine:
    """A stream whose sizes are known at every batch."""

    stream: MemoryStream
    """At `batch`."""
    batch: int
    slopes: tuple[int, ...]
    """Bytes a further sample adds to each allocation."""
    growth: tuple[tuple[int, ...], ...]
    """What a further sample adds to each dim of each allocation's shape."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What an extrapolated stream has other than a traced one."""

    count: int
    """Allocations of another size."""
    bytes: int
    """Largest difference among them."""
    total: int
    """Allocations compared."""

    @property
    def is_exact(self) -> bool:
        """Whether no allocation differs."""
        return self.count == 0


def affine(first: MemoryStream, second: MemoryStream) -> Affine:
    """Return the stream at every batch, from traces at two.

    Frees come in another order now and then, because autograd has a thread of its own: births
    alone are compared, and the order of the first trace is kept.

    Raises:
        NotAffineError: if the traces differ in more than sizes, or sizes not by whole bytes.
    """
    one, other = _batches(first, second)
    pairs = _matched(first, second)
    step = other - one
    slopes, growth = [], []
    for before, after in pairs:
        slope, rest = divmod(after.size - before.size, step)
        if rest:
            raise NotAffineError(
                f"{before.operator or 'an allocation'} has {before.size} bytes at a batch of {one} "
                f"and {after.size} at {other}: no whole number a sample"
            )
        slopes.append(slope)
        growth.append(
            tuple((b - a) // step for a, b in zip(before.shape, after.shape, strict=False))
        )
    return Affine(stream=first, batch=one, slopes=tuple(slopes), growth=tuple(growth))


def difference(expected: MemoryStream, traced: MemoryStream) -> Difference:
    """Return what an extrapolated stream has other than the traced one at that batch.

    Raises:
        NotAffineError: if they do not even hold the same allocations.
    """
    pairs = _matched(expected, traced)
    off = [abs(a.size - b.size) for a, b in pairs if a.size != b.size]
    return Difference(count=len(off), bytes=max(off, default=0), total=len(pairs))


def _grown(allocation: Allocation, slope: int, growth: Sequence[int], more: int) -> Allocation:
    if not slope or not more:
        return allocation
    shape = tuple(dim + by * more for dim, by in zip(allocation.shape, growth, strict=False))
    # By hand, at half the time of `replace`: a search makes hundreds of thousands of them.
    return Allocation(
        size=max(0, allocation.size + slope * more),
        component=allocation.component,
        phase=allocation.phase,
        step=allocation.step,
        operator=allocation.operator,
        module=allocation.module,
        line=allocation.line,
        shape=shape,
        dtype=allocation.dtype,
        stream=allocation.stream,
        used_on=allocation.used_on,
    )


def _batches(first: MemoryStream, second: MemoryStream) -> tuple[int, int]:
    if first.batch is None or second.batch is None or first.batch == second.batch:
        raise NotAffineError("two traces with different, known batches are needed")
    return first.batch, second.batch


def _matched(first: MemoryStream, second: MemoryStream) -> list[tuple[Allocation, Allocation]]:
    pairs = list(zip(first.allocations, second.allocations, strict=False))
    for number, (one, other) in enumerate(pairs):
        if (one.operator, one.phase, one.step) != (other.operator, other.phase, other.step):
            raise NotAffineError(
                f"allocation {number} is of {one.operator or 'setup'} in one trace "
                f"and of {other.operator or 'setup'} in the other"
            )
    if len(first.allocations) != len(second.allocations):
        raise NotAffineError(
            f"one trace has {len(first.allocations)} allocations, the other "
            f"{len(second.allocations)}"
        )
    return pairs
