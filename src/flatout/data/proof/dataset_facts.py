"""What must be known of a script's data set before its samples are made in another way.

`examine` finds out whether it gives the same sample each time, by asking it twice; `find_catcher`
whether it goes on after an error of any kind. `DatasetFacts` keeps answers, refusals included, for
each epoch. `stand_in` makes a data set that looks like the script's own and gives other samples.
"""

import dis
import hashlib
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FunctionType
from typing import Any, Generic, TypeVar

from flatout.data.proof.forked import ForkedError, in_fork, in_forks
from flatout.data.proof.reachable_functions import codes, is_of_library, reached
from flatout.data.values import encode
from flatout.records.errors import NotApplicable

Found = TypeVar("Found")
ALIKE = 2
"""Sets of one class and length that are known at a time. A script that builds its set again for
each epoch would otherwise have all of them, and what is kept for each, in memory."""


class DatasetFacts(Generic[Found]):
    """What was found for each data set, by its identity; the set is held so that it keeps its own.

    A technique that refuses a loader is asked again at each epoch: it then gives the reason that
    it had when the loader was made, and not another one.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, Found | NotApplicable]] = {}

    def find(self, dataset: Any, look: Callable[[], Found]) -> Found:
        """Return what was found, looking the first time.

        Raises:
            NotApplicable: what looking raised, now or then.
        """
        if id(dataset) not in self._known:
            self._forget_like(dataset)
            try:
                answer: Found | NotApplicable = look()
            except NotApplicable as reason:
                answer = reason
            self._known[id(dataset)] = (dataset, answer)
        return self.known(dataset)

    def known(self, dataset: Any) -> Found:
        """Return what was found earlier."""
        _, answer = self._known.get(id(dataset), (None, NotApplicable(UNSEEN)))
        if isinstance(answer, NotApplicable):
            raise NotApplicable(str(answer))
        return answer

    def _forget_like(self, dataset: Any) -> None:
        """Make room for a set: the oldest of its kind are known no more."""
        alike = [key for key, (known, _) in self._known.items() if _kind(known) == _kind(dataset)]
        for key in alike[: len(alike) - ALIKE + 1]:
            del self._known[key]


def _kind(dataset: Any) -> tuple[type, int]:
    """Return what a set has in common with the one that a script builds in its place."""
    try:
        return type(dataset), len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return type(dataset), -1


UNSEEN = "the loader was made before the technique could see its data set"


PROBED = 16
"""Samples that are made twice: a flip of a coin from a stream of its own hides once in 65,536."""
LIMIT_S = 30.0
"""Longest time for the samples; a data set that is slower still is not examined."""
OTHER_BATCHES = "batches that the data set makes as a whole differ from its single samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeats:
    """What making samples twice showed."""

    trouble: str = ""
    """Why samples may differ from call to call; empty where they do not."""
    sample_bytes: int = 0
    """Mean size of an encoded sample."""

    @property
    def is_same(self) -> bool:
        """Whether every sample came twice bit by bit."""
        return not self.trouble


def examine(dataset: Any, *, limit_s: float = LIMIT_S) -> Repeats:
    """Return whether a map-style data set gives the same samples each time.

    The samples are made in a forked copy of the process, each twice and with the random streams of
    Python, numpy and torch in different places. A data set that draws from these streams is seen
    even where the draw did not show in the sample. One that makes whole batches must make them of
    these samples.
    """
    if hasattr(dataset, "set_epoch"):
        return Repeats(trouble="the data set has set_epoch: its samples change with the epoch")
    count = len(dataset)
    if count == 0:
        return Repeats(trouble="the data set is empty")
    indices = sorted({round(i * (count - 1) / max(1, PROBED - 1)) for i in range(PROBED)})
    try:
        found = in_fork(lambda: _examine(dataset, indices), limit_s)
    except ForkedError as error:
        return Repeats(trouble=f"its samples could not be examined: {error}")
    return Repeats(**found)


def _examine(dataset: Any, indices: Sequence[int]) -> dict[str, Any]:
    # Techniques import this module where there is no torch, which the streams need.
    from flatout.data.proof.random_streams import Streams

    samples: dict[int, bytes] = {}
    for index in indices:
        reseed(1)
        streams = Streams()
        samples[index] = first = b"".join(encode(dataset[index]))
        if streams.are_moved():
            return {"trouble": f"sample {index} draws random numbers"}
        reseed(2)
        if b"".join(encode(dataset[index])) != first:
            return {"trouble": f"sample {index} is another one each time"}
    streams = Streams()
    # Torch's loader asks for whole batches wherever it can, and not for samples. Batches of two
    # sizes are made, and not in rising order: one that pads or sorts its batch shows.
    for asked in (indices[::-1], indices[:2]) if getattr(dataset, "__getitems__", None) else ():
        batch = [b"".join(encode(sample)) for sample in dataset.__getitems__(asked)]
        if streams.are_moved():
            return {"trouble": "a batch that the data set makes as a whole draws random numbers"}
        if batch != [samples[index] for index in asked]:
            return {"trouble": OTHER_BATCHES}
    return {"sample_bytes": sum(map(len, samples.values())) // len(samples)}


REMEMBERED = 3
"""Samples that are made again after themselves: one is kept, or the one before it is mixed in."""
MEMORY_LIMIT_S = 10.0


def remembers(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Return whether samples that were made before make others of the same draws.

    So it is with one that keeps augmented samples, or counts how many it gave.
    """
    from flatout.data.proof.random_streams import generators_of, set_back

    def later_batch() -> str:
        generators = generators_of(dataset, collate=collate)
        _digest(dataset, collate, 1)
        set_back(generators)
        return _digest(dataset, collate, 2)

    return _is_other(later_batch, lambda: _digest(dataset, collate, 2))


def goes_on(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Return whether a data set makes other samples once it made some, by whatever it holds.

    A generator of its own, say, or a count of its epochs: fresh copies of it begin again.
    """

    def later_batch() -> str:
        _digest(dataset, collate, 1)
        return _digest(dataset, collate, 2)

    return _is_other(later_batch, lambda: _digest(dataset, collate, 2))


def _digest(dataset: Any, collate: Callable[[Any], Any], seed: int) -> str:
    """Return a short name of the first samples, made with the random streams in a known place."""
    from torch.utils.data import IterableDataset

    reseed(seed)
    if isinstance(dataset, IterableDataset):
        samples = list(islice(iter(dataset), REMEMBERED))
    else:
        samples = [dataset[index] for index in range(min(REMEMBERED, len(dataset)))]
    return hashlib.blake2b(b"".join(encode(collate(samples)))).hexdigest()


def _is_other(later: Callable[[], str], fresh: Callable[[], str]) -> bool:
    """Return whether a forked copy gives something else than two fresh ones, which agree.

    What cannot be asked is False.
    """
    found = in_forks([fresh, fresh, later], MEMORY_LIMIT_S)
    first, again, other = (answer.get("value") if answer else None for answer in found)
    return None not in (first, other) and first == again != other


def reseed(seed: int) -> None:
    """Put the random streams of Python, numpy and torch somewhere."""
    import torch

    random.seed(seed)
    torch.default_generator.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


MATCHES = frozenset({"CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"})
"""Opcodes of `except SomeError`, since Python 3.11 and in 3.10."""
NARROW = frozenset(
    {
        *("OSError", "IOError", "FileNotFoundError", "PermissionError", "UnidentifiedImageError"),
        *("KeyError", "IndexError", "StopIteration", "ImportError", "ModuleNotFoundError"),
    }
)
"""Errors that no array is refused with."""


def find_catcher(dataset: Any) -> str:
    """Return the name of a function that catches errors of any kind, or nothing.

    Looked at are the methods that give samples, in the data set, in what it holds and in its
    transforms, and what they call of their own object, of the script's modules and of closures.

    Data sets that skip broken files catch such errors. What stands for an array is refused by code
    that knows true arrays only. Such an error ends the following and the batch is made again,
    unless the data set itself catches it: then it would hand out another sample than it does on its
    own, and no one would see it.
    """
    for name, value in reached(dataset):
        if type(value) is not FunctionType or is_of_library(value):
            continue
        if any(_catches_all(code) for code in codes(value)):
            return name if "." in name else value.__qualname__
    return ""


def _catches_all(code: CodeType) -> bool:
    if "suppress" in code.co_names:
        return True
    if not getattr(code, "co_exceptiontable", b"?"):
        return False  # Python 3.11 and later: nothing is caught
    found = [x for x in dis.get_instructions(code) if x.opname not in ("CACHE", "EXTENDED_ARG")]
    for number, one in enumerate(found):
        before, after = found[number - 1], found[min(number + 1, len(found) - 1)]
        if one.opname in MATCHES and before.argval not in NARROW:
            return True
        # A bare `except:` drops the error at once; `finally` and `with` do not.
        if one.opname == "PUSH_EXC_INFO" and after.opname == "POP_TOP":
            return True
    return False


def stand_in(dataset: Any, members: Mapping[str, Any], again: tuple[Any, ...]) -> Any:
    """Return an object of a subclass of a data set's class that shares all of its attributes.

    `again`: a function and its arguments that make the same object in another process.
    """
    kind = type(dataset)
    namespace = {
        **members,
        "__reduce_ex__": lambda _self, _protocol: again,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    shared: Any
    try:
        shared = object.__new__(type(kind.__name__, (kind,), namespace))
        shared.__dict__ = vars(dataset)
    except TypeError as error:
        raise NotApplicable(f"a {kind.__name__} cannot be stood in for: {error}") from None
    return shared
