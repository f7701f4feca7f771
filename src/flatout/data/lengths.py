"""Lengths of samples, and an order in which a batch's samples are about as long as each other."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from flatout.core.errors import NotApplicable
from flatout.data.forked import in_forks
from flatout.seams.text import MASK

TOKENS = "input_ids"
LIMIT_S = 60.0


def lengths_of(dataset: Any, *, processes: int, limit_s: float = LIMIT_S) -> list[int]:
    """Return the number of tokens of every sample, counted in forked processes.

    Raises:
        NotApplicable: if a sample does not tell, or counting takes too long.
    """
    count = len(dataset)

    def part(first: int) -> Any:
        return lambda: [length_of(dataset[i]) for i in range(first, count, processes)]

    answers = in_forks([part(first) for first in range(processes)], limit_s)
    lengths = [0] * count
    for first, answer in enumerate(answers):
        if answer is None:
            raise NotApplicable(
                f"counting the tokens of {count} samples takes over {limit_s:.0f} s"
            )
        if "error" in answer:
            raise NotApplicable(f"the lengths of the samples are not known: {answer['error']}")
        lengths[first::processes] = answer["value"]
    return lengths


def length_of(sample: Any) -> int:
    """Return the number of tokens of a sample: those that its mask keeps, or all it has.

    >>> length_of({"input_ids": [5, 6, 0], "attention_mask": [1, 1, 0]}), length_of(([7, 8], 1))
    (2, 2)

    Raises:
        ValueError: if a sample has neither.
    """
    if isinstance(sample, Mapping):
        if MASK in sample:
            return int(sum(1 for kept in _plain(sample[MASK]) if kept))
        if TOKENS in sample:
            return len(sample[TOKENS])
    elif isinstance(sample, tuple | list) and sample and _is_tokens(sample[0]):
        return len(sample[0])
    elif _is_tokens(sample):
        return len(sample)
    raise ValueError("a sample has no input_ids and no list of tokens")


def _plain(values: Any) -> Sequence[Any]:
    found: Sequence[Any] = values.tolist() if hasattr(values, "tolist") else values
    return found


def _is_tokens(value: Any) -> bool:
    """Tell whether a value is a row of whole numbers."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return len(value.shape) == 1 and "int" in str(value.dtype)
    return isinstance(value, list) and bool(value) and all(isinstance(x, int) for x in value)


class SimilarLengths:
    """Batches of samples of similar length, in a new order every epoch; each sample once.

    A random permutation is cut into windows of some batches; within a window samples are sorted by
    length and cut into batches, whose order is random again. Ranks that share the batches must each
    give a generator of the same seed, or every rank draws another order.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        window: int,
        drop_last: bool = False,
        generator: Any = None,
    ) -> None:
        if batch_size < 1 or window < 1:
            raise ValueError(f"batch_size={batch_size} and window={window} must be at least 1")
        self.lengths = lengths
        self.batch_size = batch_size
        self.window = window
        self.drop_last = drop_last
        self.generator = generator

    def __len__(self) -> int:
        count = len(self.lengths)
        return count // self.batch_size if self.drop_last else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        import torch

        generator = self.generator
        if generator is None:  # as torch's own random sampler does: one draw an epoch
            generator = torch.Generator()
            generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(len(self.lengths), generator=generator).tolist()
        if self.drop_last:
            order = order[: len(self) * self.batch_size]
        batches: list[list[int]] = []
        short: list[list[int]] = []
        size = self.batch_size * self.window
        for first in range(0, len(order), size):
            group = sorted(order[first : first + size], key=lambda i: self.lengths[i])
            cut = [group[i : i + self.batch_size] for i in range(0, len(group), self.batch_size)]
            (short if len(cut[-1]) < self.batch_size else batches).append(cut.pop())
            batches += cut
        for place in torch.randperm(len(batches), generator=generator).tolist():
            yield batches[place]
        yield from short
