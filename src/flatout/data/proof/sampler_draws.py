"""When torch's samplers draw their numbers, and how far ahead they may be asked without a trace."""

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from flatout.records.errors import NotApplicable

TORCH_SAMPLERS = frozenset(
    {
        "torch.utils.data.sampler.RandomSampler",
        "torch.utils.data.sampler.SequentialSampler",
        "torch.utils.data.distributed.DistributedSampler",
    }
)
"""Samplers whose numbers depend on what they draw alone. All but a `RandomSampler` with a generator
given draw once, when their first number is asked for."""


DRAWN_AT_ONCE = 32
"""Numbers that `RandomSampler` draws together with replacement (torch/utils/data/sampler.py)."""


def sampler_of(arguments: Mapping[str, Any]) -> Any:
    """Return what gives the numbers of the samples; None where torch is to make it."""
    return getattr(arguments.get("batch_sampler"), "sampler", None) or arguments.get("sampler")


def check_sampler(arguments: Mapping[str, Any]) -> None:
    """Make sure that a loader's sampler is one of torch's own, whose way to draw is known."""
    from torch.utils.data import BatchSampler

    batch_sampler, sampler = arguments.get("batch_sampler"), sampler_of(arguments)
    if batch_sampler is not None and type(batch_sampler) is not BatchSampler:
        raise NotApplicable(f"{type(batch_sampler).__name__} may draw numbers as it goes")
    kind = type(sampler)
    if sampler is not None and f"{kind.__module__}.{kind.__qualname__}" not in TORCH_SAMPLERS:
        raise NotApplicable(f"{kind.__name__} may draw numbers as it goes")


def settled_numbers(sampler: Any) -> int | None:
    """Return how many numbers of an epoch are settled when it starts; None for all of them.

    A `RandomSampler` that was given a generator draws from it again once the numbers of its first
    draw are used up, even where it needs no more. A script may draw from the same generator
    meanwhile, or leave the epoch before. Without one it makes its own, which no one else has.
    """
    from torch.utils.data import RandomSampler

    if type(sampler) is not RandomSampler or sampler.generator is None:
        return None
    if sampler.replacement:
        return DRAWN_AT_ONCE if sampler.num_samples > DRAWN_AT_ONCE else None
    first = len(sampler.data_source)
    return first if sampler.num_samples >= first else None


def settled_batches(loader: Any, gone: int) -> int | None:
    """Return how many batches after those that are gone are settled; None for all of them."""
    batches = loader.batch_sampler
    numbers = settled_numbers(loader.sampler if batches is None else batches.sampler)
    if numbers is None:
        return None
    return max(0, int(numbers // (1 if batches is None else batches.batch_size)) - gone)


def drawn_early(batches: Iterator[Any], ahead: int) -> Iterator[Any]:
    """Return batches of numbers, drawn when a loader with workers draws them.

    It draws as many as its workers make ahead when it starts, and one more with each that it hands
    out. What a sampler draws from, the script may draw from in between, or leave the epoch early.
    """
    drawn = deque(islice(batches, ahead))

    def hand_out() -> Iterator[Any]:
        while drawn:
            drawn.extend(islice(batches, 1))
            yield drawn.popleft()

    return hand_out()
