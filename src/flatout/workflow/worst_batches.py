"""Batches of another size, or of one sample again and again, in the place of a batch sampler's.

Trainers that share data out among processes (Accelerate's, transformers') hand their loaders a
batch sampler instead of a batch size.
"""

from collections.abc import Iterator
from typing import Any


class WorstBatches:
    """As many batches as a sampler makes, each of `size` samples; else it answers as the sampler.

    Args:
        sampler: The one that is replaced.
        size: Samples of a batch.
        index: The sample that every batch holds; None takes the sampler's own, over and over.
    """

    def __init__(self, sampler: Any, size: int, index: int | None = None) -> None:
        self.original, self.batch_size, self.index = sampler, size, index

    def __iter__(self) -> Iterator[list[int]]:
        for numbers in self.original:
            own = list(numbers) if self.index is None else [self.index]
            yield (own * -(-self.batch_size // len(own)))[: self.batch_size]

    def __len__(self) -> int:
        return len(self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


def size_of(sampler: Any) -> int | None:
    """Return how many samples a batch sampler puts into a batch; None where it does not say."""
    size = getattr(sampler, "batch_size", None)
    return size if type(size) is int and size > 0 else None
