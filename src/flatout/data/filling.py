"""Batches in which the place of a sample that cannot be read is taken by another of the batch.

A batch whose samples are all read is torch's own, made by torch's own code. One that fails for an
unreadable file is made again sample by sample, to learn which they are, and then as a whole with
the places of these filled. The mean gradient of such a batch is, on average, that of the samples
that could be read, its shape is what it was, and every rank makes as many steps as before.
"""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import get_worker_info
from torch.utils.data._utils import fetch as fetching

from flatout.data.collations import find_collation
from flatout.data.streams import Streams
from flatout.data.unreadable import (
    Log,
    UnreadableError,
    file_of,
    frames_of,
    is_unreadable,
    words_of,
)

MARK = "_flatout_filling"
"""On the fetchers' class once they fill."""
MOST_TOLD = 8
"""Indices that a process tells the others it could read."""
JUDGED = 1_000
"""Samples of an epoch whose length nobody knows: of fewer a share says nothing."""
WRONG = "so this is not a few files: look at the data set"


class FillingCollate:
    """The script's own collation, of a loader whose unreadable samples are left out."""

    def __init__(self, collate: Callable[[Any], Any], log: Log, number: int, share: float) -> None:
        self.collate = self.__wrapped__ = collate
        self.log, self.number, self.share = log, number, share
        self.readable: Sequence[Any] = ()
        """Indices that this process has read, for a batch in which none can be."""
        self.seen = 0
        """Bytes of the log that this process has counted."""
        self.length: int | None = None
        """Samples of an epoch, None where nobody knows."""
        self.missed = 0
        """Samples left out in this epoch, by all workers."""
        self.read = 0
        """Samples that this process was asked for since it last counted the beginning of one."""
        install()

    def __call__(self, samples: Any) -> Any:
        """Collate."""
        return self.collate(samples)

    def __reduce__(self) -> Any:
        # A spawned worker installs what it needs.
        return FillingCollate, (self.collate, self.log, self.number, self.share)

    def begin_epoch(self, length: int | None) -> None:
        """Let an epoch begin, of so many samples; None where nobody knows."""
        self.log.write({"loader": self.number, "epoch": True, "length": length})

    def note(self, dataset: Any, place: Any, error: BaseException, read: int = 0) -> None:
        """Note a sample that was left out; copies of the process that try things out note none.

        Args:
            dataset: what could not read it.
            place: its index, or its number in a stream.
            error: what it was read with.
            read: samples that this process has taken from a stream in this epoch.

        Raises:
            UnreadableError: if these are too many in this epoch.
        """
        worker = get_worker_info()
        if worker is None and os.getpid() != self.log.owner:
            return
        sample, words = f"sample {place} of {type(dataset).__name__}", words_of(error)
        path = file_of(error)
        self.log.write(
            {
                "loader": self.number,
                "who": "the training process" if worker is None else f"worker {worker.id}",
                "name": f"{path!r}" if path else sample,
                "error": words,
            }
        )
        self._count()
        read = max(read, self.read) * (1 if worker is None else worker.num_workers)
        # A loader may be iterated once for all epochs: then what was read is more than one.
        length = max(self.length or JUDGED, read)
        if self.missed > max(1, int(self.share * length)):
            raise UnreadableError(
                f"{self.missed} of {length} samples of an epoch cannot be read, more than "
                f"most_share={self.share} allows, {WRONG}. The last: {path or sample} ({words})"
            )

    def _count(self) -> None:
        """Count what all processes noted since the last epoch began."""
        lines, self.seen = self.log.read(self.seen)
        for line in lines:
            if line["loader"] == self.number:
                self.missed = 0 if "epoch" in line else self.missed + ("name" in line)
                self.read = 0 if "epoch" in line else self.read
                self.length = line["length"] if "epoch" in line else self.length

    def tell_readable(self, indices: Any) -> None:
        """Tell the other workers some samples that could be read."""
        if all(isinstance(index, int) for index in indices):
            self.log.write({"loader": self.number, "readable": list(indices)[:MOST_TOLD]})

    def read_by_others(self) -> list[Any]:
        """Return some samples that any process of this loader could read."""
        own = (line for line in self.log.read()[0] if line["loader"] == self.number)
        return next((line["readable"] for line in own if "readable" in line), [])


def find_plan(collate: Any) -> FillingCollate | None:
    """Return the collation that asks for filling, under what others wrapped around it."""
    return find_collation(collate, FillingCollate)


def without_filling(collate: Any) -> Any:
    """Return the collation that a loader had before its batches were filled."""
    return collate.collate if isinstance(collate, FillingCollate) else collate


def install() -> None:
    """Make torch's fetchers fill the batches of loaders that collate with `FillingCollate`."""
    base: Any = fetching._BaseDatasetFetcher
    if getattr(base, MARK, False):
        return
    _install_in(fetching._MapDatasetFetcher, _fetch_numbers)
    _install_in(fetching._IterableDatasetFetcher, _fetch_next)
    setattr(base, MARK, True)


def _install_in(kind: Any, fetch_filled: Callable[..., Any]) -> None:
    original = kind.fetch

    @functools.wraps(original)
    def fetch(fetcher: Any, indices: Any) -> Any:
        plan = find_plan(fetcher.collate_fn)
        if plan is None or not fetcher.auto_collation:
            return original(fetcher, indices)
        return fetch_filled(functools.partial(original, fetcher), fetcher, indices, plan)

    kind.fetch = fetch


def _fetch_numbers(
    make: Callable[[Any], Any], fetcher: Any, indices: Any, plan: FillingCollate
) -> Any:
    streams = Streams()
    plan.read += len(indices)
    try:
        batch = make(indices)
    except Exception as error:
        if not is_unreadable(error):
            raise
    else:
        if not plan.readable:
            plan.tell_readable(indices)
        plan.readable = indices
        return batch
    filled = _filled(make, fetcher.dataset, indices, plan)
    streams.set_back()  # to draw once for a batch, however often it was tried
    return make(filled)


def _filled(
    make: Callable[[Any], Any], dataset: Any, indices: Any, plan: FillingCollate
) -> list[Any]:
    """Return the indices with others in the places of those that cannot be read.

    Raises:
        UnreadableError: if none can be read and none was before, or if these are too many.
    """
    # Each is collated too: pictures that wait for the batch are decoded only there.
    errors = {place: _find_error(make, index) for place, index in enumerate(indices)}
    missed = {place: error for place, error in errors.items() if error is not None}
    readable = [index for place, index in enumerate(indices) if errors[place] is None]
    readable = readable or list(plan.readable) or plan.read_by_others()
    if not readable:
        first = next(iter(missed.values()))
        raise UnreadableError(
            f"none of the {len(missed)} samples of the first batch can be read, {WRONG}. "
            f"The first: {words_of(first)}"
        ) from first
    filled = list(indices)
    for place, error in missed.items():
        plan.note(dataset, filled[place], error)
        filled[place] = readable[place % len(readable)]
    plan.readable = readable
    return filled


def _find_error(make: Callable[[Any], Any], index: Any) -> Exception | None:
    """Return what reading a sample fails with.

    Other errors may come of a batch of one, and come again with the whole batch if not.
    """
    try:
        make([index])
    except Exception as error:  # noqa: BLE001  the user's code runs here
        return error if is_unreadable(error) else None
    return None


def _fetch_next(
    make: Callable[[Any], Any], fetcher: Any, indices: Any, plan: FillingCollate
) -> Any:
    if not isinstance(fetcher.dataset_iter, _Following):
        fetcher.dataset_iter = _Following(fetcher.dataset_iter, fetcher.dataset, plan, len(indices))
    return make(indices)


class _Following:
    """An iterator that goes on to the next sample after one that cannot be read."""

    def __init__(self, samples: Any, dataset: Any, plan: FillingCollate, batch: int) -> None:
        self.samples, self.dataset, self.plan, self.batch = samples, dataset, plan, batch
        self.number = 0
        self.has_read = False

    def __iter__(self) -> "_Following":
        return self

    def __next__(self) -> Any:
        failure: Exception | None = None
        while True:
            try:
                sample = next(self.samples)
            except StopIteration:
                if failure is None:
                    raise
                raise self._ended(failure) from failure
            except Exception as error:
                if not is_unreadable(error):
                    raise
                failure = self._passed_over(error)
                continue
            self.number += 1
            self.has_read = True
            return sample

    def _passed_over(self, error: Exception) -> Exception:
        """Note a sample that is passed over, where that is possible and sensible."""
        if _has_ended_a_generator(error):
            raise self._ended(error) from error
        self.plan.note(self.dataset, self.number, error, self.number)
        self.number += 1
        if not self.has_read and self.number >= self.batch:
            raise UnreadableError(
                f"none of the first {self.number} samples of the stream can be read, {WRONG}. "
                f"The last: {words_of(error)}"
            ) from error
        return error

    def _ended(self, error: Exception) -> UnreadableError:
        return UnreadableError(
            f"sample {self.number} of {type(self.dataset).__name__} cannot be read "
            f"({words_of(error)}), and nothing comes after it: an error ends a generator, so catch "
            "it where the generator reads, and go on there"
        )


def _has_ended_a_generator(error: BaseException) -> bool:
    """Tell whether an error came out of a generator, which is over then, below iterators or not.

    `itertools.chain` would go on with the next of its parts: the rest of this one is lost.
    """
    frames = [x for x in frames_of(error.__traceback__) if x.f_code.co_name != "__next__"]
    return bool(frames) and bool(frames[0].f_code.co_flags & inspect.CO_GENERATOR)
