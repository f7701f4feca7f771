"""The data of a script that is traced: loaded in its own process, in batches of the asked size.

A plan is for the worst batch: `HostData` and `worst_case` let a loader draw its largest sample
again and again, by `WorstBatches` in the place of a batch sampler's; `FullBatches` fills the last.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from flatout.agent.samples import sample_size
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique


class _Instead:
    """Takes a sampler's place; what it is asked beyond its numbers that sampler answers.

    Args:
        sampler: The one that is replaced.
        size: Samples of a batch.
        index: The sample that is drawn in the place of each; None draws the sampler's own.
    """

    def __init__(self, sampler: Any, size: int, index: int | None = None) -> None:
        self.original, self.batch_size, self.index = sampler, size, index

    def __len__(self) -> int:
        return len(self.original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)


class WorstBatches(_Instead):
    """As many batches as a batch sampler makes, each full; its own samples come over and over.

    Trainers that share data out among processes (Accelerate's, transformers') hand their loaders a
    batch sampler instead of a batch size.
    """

    def __iter__(self) -> Iterator[list[int]]:
        for numbers in self.original:
            own = list(numbers) if self.index is None else [self.index]
            yield (own * -(-self.batch_size // len(own)))[: self.batch_size]


class FullBatches(_Instead):
    """What a sampler draws, and its first ones again until the last batch is full.

    In an epoch of few batches a trace would see the last one, which asks for less.
    """

    def __iter__(self) -> Iterator[Any]:
        first: list[Any] = []
        count = 0
        for count, own in enumerate(self.original, start=1):
            number = own if self.index is None else self.index
            first += [number] if count < self.batch_size else []
            yield number
        yield from first[: -count % self.batch_size]

    def __len__(self) -> int:
        return -(-len(self.original) // self.batch_size) * self.batch_size


def size_of(sampler: Any) -> int | None:
    """Return how many samples a batch sampler puts into a batch; None where it does not say."""
    size = getattr(sampler, "batch_size", None)
    return size if type(size) is int and size > 0 else None


LOOK_S = 3.0
"""How long samples are looked at."""
MOST_SAMPLES = 20_000
ALIKE = 64
"""So many samples of one size mean that all have it."""
FEW_BATCHES = 64
"""A trace does not come to the last batch of an epoch of more."""

Note = Callable[[str], None]


def worst_case(arguments: Mapping[str, Any], note: Note) -> Mapping[str, Any]:
    """Return what changes in a loader's arguments, so that every sample is the largest one.

    Only where that is cheap: samples are looked at for a few seconds at most, and where the first
    ones are all of one size nothing is changed.

    Args:
        arguments: Those of a `DataLoader`, by parameter name.
        note: Is told what was found, or why nothing was looked at.
    """
    dataset: Any = arguments.get("dataset")
    sampler = arguments.get("batch_sampler")
    size = None if sampler is None else size_of(sampler)
    kind = type(dataset)
    is_indexed = hasattr(kind, "__getitem__") and hasattr(kind, "__len__")
    if (sampler is not None and size is None) or not is_indexed:
        note(
            "the data set was not looked at for its largest sample (a batch sampler of its own, or "
            "iterable data): planned is the batch that the script drew first"
        )
        return {}
    try:
        index, seen, is_uniform = largest(dataset)
    except Exception as error:  # noqa: BLE001  the script's own data may fail in any way
        note(f"the data set could not be looked at for its largest sample: {error}")
        return {}
    if is_uniform:
        index = None
    if index is not None:
        note(
            f"samples differ in size: planned is a batch of the largest of {seen} that were looked "
            f"at, number {index}"
        )
    if size is None:
        return _drawn(arguments, index)
    is_changed = index is not None or len(dataset) > size
    return {"batch_sampler": WorstBatches(sampler, size, index)} if is_changed else {}


def _drawn(arguments: Mapping[str, Any], index: int | None) -> Mapping[str, Any]:
    """Return the sampler that draws one sample again and again, or its own in full batches."""
    from torch.utils.data import RandomSampler, SequentialSampler

    dataset: Any = arguments["dataset"]
    own: Any = arguments.get("sampler")
    size = arguments.get("batch_size") or 1
    numbers = dataset if own is None else own
    count = len(numbers) if hasattr(numbers, "__len__") else 0
    ends_short = (
        size < count < FEW_BATCHES * size and count % size and not arguments.get("drop_last")
    )
    if index is None and not ends_short:
        return {}
    if own is None and arguments.get("shuffle"):
        own = RandomSampler(dataset, generator=arguments.get("generator"))
    elif own is None:
        own = SequentialSampler(dataset)
    return {"sampler": FullBatches(own, size if ends_short else 1, index), "shuffle": False}


def largest(dataset: Any) -> tuple[int | None, int, bool]:
    """Return the number of the largest sample, how many were looked at, and if all were alike."""
    ends_at = time.monotonic() + LOOK_S
    sizes: list[int] = []
    for index in range(min(len(dataset), MOST_SAMPLES)):
        sizes.append(sample_size(dataset[index]))
        is_uniform = len(sizes) == ALIKE and len(set(sizes)) == 1
        if is_uniform or time.monotonic() > ends_at:
            break
    if not sizes:
        return None, 0, True
    return sizes.index(max(sizes)), len(sizes), len(set(sizes)) == 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HostData(Technique):
    """Load the data in this process, unpinned, and in batches of the size that is asked for."""

    batch: int | None = None
    said: list[str] = field(default_factory=list)
    """What was found while the loader was looked at, for the stream's notes."""
    sizes: list[int] = field(default_factory=list)
    """Samples in the data sets of the loaders, where they know it."""
    own: list[int] = field(default_factory=list)
    """Batch sizes that the script gave its loaders: what `batch` can be put in the place of."""

    addresses: ClassVar[frozenset[str]] = frozenset()
    numerics: ClassVar[Numerics] = Numerics.TRAINING

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["HostData"]:
        """Return nothing: this is no technique."""
        return ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Predict nothing: this is no technique."""
        return Effect()

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments without workers and pinning, for the worst batch there is."""
        from torch.utils._python_dispatch import _disable_current_modes

        wanted = {**arguments, "num_workers": 0, "pin_memory": False, "timeout": 0}
        with contextlib.suppress(TypeError, NotImplementedError):
            self.sizes.append(len(arguments["dataset"]))
        sampler = wanted.get("batch_sampler")
        size = wanted.get("batch_size") if sampler is None else size_of(sampler)
        if size is not None:
            self.own.append(size)
        if self.batch is not None and size is not None and sampler is not None:
            wanted["batch_sampler"] = WorstBatches(sampler, self.batch)
        elif self.batch is not None and size is not None:
            wanted["batch_size"] = self.batch
        with _disable_current_modes():
            worst = worst_case(wanted, self.said.append)
        return {**wanted, **worst}
