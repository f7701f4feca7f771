"""The batches of a Task on one rank: its part of each, in the order that one process has.

All ranks choose the same batches, by random streams that they share. What a rank draws while it
fetches and computes comes from a seed of the step and the part, so that a training that was stopped
goes on with the numbers that it would have drawn.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from flatout.agent.samples import leading_size
from flatout.agent.task import Task
from flatout.agent.task_loop import batches_of
from flatout.data.proof.random_streams import Streams
from flatout.parallel.batches import Part, RankSeeds, part_of_batch
from flatout.parallel.group import seed_all
from flatout.records.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class PartOfBatch:
    """This rank's part of one batch."""

    epoch: int
    number: int
    """Batches of the epoch up to this one, from 1."""
    batch: Any
    samples: int
    """In the whole batch; 0 where that cannot be said."""
    own: int
    """Samples in the part; one that weighs nothing where there are fewer samples than parts."""
    share: float
    """Of this part's mean in the mean over the batch."""


class _PartSampler:
    """A batch sampler's batches, this rank's part of each; the sizes are noted in order."""

    def __init__(
        self, batches: Iterable[list[Any]], part: Part, draw: Callable[[Iterator[Any]], Any]
    ) -> None:
        self.batches, self.part, self.draw = batches, part, draw
        self.sizes: deque[int] = deque()
        self.skipped = 0
        """Batches of the next epoch that were trained before and are not fetched."""

    def __iter__(self) -> Iterator[list[Any]]:
        self.sizes.clear()
        return self._take(iter(self.batches), self.skipped)

    def _take(self, chosen: Iterator[list[Any]], skipped: int) -> Iterator[list[Any]]:
        while (batch := self.draw(chosen)) is not None:
            if skipped:
                skipped -= 1
                continue
            self.sizes.append(len(batch))
            yield self.part.take(batch)

    def __len__(self) -> int:
        return len(self.batches) - self.skipped  # type: ignore[arg-type]


class TaskBatches:
    """What a Task trains on, of which each rank gets its part."""

    def __init__(self, task: Task, part: Part) -> None:
        self.task, self.part = task, part
        self.sampler: _PartSampler | None = None
        """Of loaders that choose samples by their numbers; others are read whole and cut."""
        self.source = self._shared_source(task)
        self.shared = Streams()
        """From which all ranks draw alike: at the beginning of an epoch."""
        self.now: Streams | None = None
        """Where those are in the epoch; None while an iterator is made: then they are the global
        ones."""
        self.epoch, self.done = 0, 0
        """Where the training is: batches that are done in this epoch."""

    def _shared_source(self, task: Task) -> Iterable[Any]:
        source = batches_of(task)
        if not isinstance(source, DataLoader):
            return source
        if isinstance(source.dataset, IterableDataset) or source.batch_sampler is None:
            return source
        self.sampler = _PartSampler(source.batch_sampler, self.part, self._draw)
        source.__dict__["batch_sampler"] = self.sampler  # DataLoader forbids setting it
        if self.part.rank:
            source.worker_init_fn = RankSeeds(self.part.rank, source.worker_init_fn)
        return source

    def _draw(self, source: Iterator[Any]) -> Any:
        """Return the next item, drawn from the shared streams; None at the end."""
        if self.now is None:
            return next(source, None)
        own = Streams()
        self.now.set_back()
        found = next(source, None)
        self.now = Streams()
        own.set_back()
        return found

    def peek(self) -> PartOfBatch:
        """Return this rank's part of a batch, for its shapes, as if it were never drawn."""
        before = Streams()
        try:
            batch = next(iter(self._parts_of_epoch()), None)
        finally:
            before.set_back()
        if batch is None:
            raise UserError(f"Task {self.task.name!r}: data() holds no batch")
        return batch

    def position(self) -> dict[str, Any]:
        """Return where the training is, as JSON values: with it `go_to` goes on from here."""
        name, keys, *rest = tuple(self.shared.numpy)
        version, words, gauss = self.shared.python
        return {
            "epoch": self.epoch,
            "done": self.done,
            "torch": self.shared.torch.tolist(),
            "python": [version, list(words), gauss],
            "numpy": [name, np.asarray(keys).tolist(), *rest],
        }

    def go_to(self, position: dict[str, Any]) -> None:
        """Go on from a position that a training was stopped at."""
        self.epoch, self.done = position["epoch"], position["done"]
        self.shared.torch = torch.tensor(position["torch"], dtype=torch.uint8)
        version, words, gauss = position["python"]
        self.shared.python = (version, tuple(words), gauss)
        name, keys, *rest = position["numpy"]
        words_of_numpy: Any = (name, np.array(keys, dtype=np.uint32), *rest)
        self.shared.numpy = words_of_numpy

    def parts(self, steps: int | None, done_steps: int) -> Iterator[PartOfBatch]:
        """Yield part after part until the steps, or else the epochs, are done."""
        count = done_steps
        while (count < steps) if steps is not None else self.epoch < self.task.epochs:
            before = self.done
            for part in self._parts_of_epoch():
                self.done = part.number
                yield part
                count += 1
                if count == steps:
                    return
            if self.done == before == 0:
                raise UserError(
                    f"Task {self.task.name!r}: epoch {self.epoch} had no batch; data() must return "
                    "something that holds a batch and can be iterated again"
                )
            self.epoch, self.done = self.epoch + 1, 0
            # What this epoch drew from the shared streams is where the next one begins.
            assert self.now is not None
            self.shared = self.now

    def _parts_of_epoch(self) -> Iterator[PartOfBatch]:
        if self.sampler is not None:
            self.sampler.skipped = self.done
        self.now = None
        self.shared.set_back()
        source = iter(self.source)
        self.now = Streams()
        number = self.done
        if self.sampler is None:
            for _ in range(self.done):
                self._draw(source)
        while True:
            self.seed_step(self.epoch, number)
            # A stream is read whole on every rank, so all of them have to draw the same.
            is_cut = self.sampler is None
            batch = self._draw(source) if is_cut else next(source, None)
            if batch is None:
                return
            number += 1
            yield self._part(batch, number)

    def is_last_of_epoch(self, part: PartOfBatch) -> bool:
        """Return whether no batch follows in its epoch; False where that is not known ahead."""
        try:
            return part.number == len(self.source) + (self.sampler.skipped if self.sampler else 0)  # type: ignore[arg-type]
        except TypeError:
            return False

    def _part(self, batch: Any, number: int) -> PartOfBatch:
        part = self.part
        if self.sampler is not None:
            samples = self.sampler.sizes.popleft()
        else:
            samples = leading_size(batch)
            if not samples:
                raise UserError(f"Task {self.task.name!r}: a batch has no tensor with samples")
            try:
                batch = part_of_batch(batch, part, samples)
            except ValueError as error:
                raise UserError(f"Task {self.task.name!r}: {error}") from None
        own = max(1, len(range(samples)[part.of(samples)]))
        return PartOfBatch(
            epoch=self.epoch,
            number=number,
            batch=batch,
            samples=samples,
            own=own,
            share=part.weight(samples),
        )

    def seed_step(self, epoch: int, number: int, place: int = 0) -> None:
        """Seed what this rank draws from here on: it differs by step, part and place.

        `place`: 0 while batches are fetched, which ranks with the same part do alike.
        """
        words = f"{self.task.seed} {epoch} {number} {self.part.rank} {place}"
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        seed_all(int.from_bytes(digest, "little") % 2**63)
