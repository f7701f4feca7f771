"""Each rank's part of every batch: the ranks together see what one process would see.

A loader that feeds the training chooses its batches as always, alike on every rank, and each rank
fetches its part of them. The global batch stays what the script asked for. Evaluation is left
alone: every rank evaluates everything, so what the script counts there needs no reduction.

Which loader feeds the training shows at its first backward. Until then batches are whole on every
rank, which trains exactly the same and is only slower.
"""

import functools
import sys
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset, get_worker_info

from flatout.agent import patching
from flatout.agent.nested import map_leaves
from flatout.agent.samples import leading_size
from flatout.data.proof.random_streams import Streams
from flatout.parallel.group import say, say_once, seed_all

CONTAINERS = (Mapping, list, tuple)
LATEST = 4
"""Batches of a loader among which the one that a model is called with is looked for."""
RANK_SEEDS = 1_000_003
"""Distance between the seeds of two ranks: more than workers a loader has."""


@dataclass(frozen=True, slots=True)
class Part:
    """Which part of a batch is one rank's, in order of ranks; sizes differ by one at most."""

    rank: int
    ranks: int

    def of(self, samples: int) -> slice:
        """Return where this rank's samples are in a batch.

        >>> Part(0, 2).of(5), Part(1, 2).of(5)
        (slice(0, 3, None), slice(3, 5, None))
        """
        whole, left = divmod(samples, self.ranks)
        start = self.rank * whole + min(self.rank, left)
        return slice(start, start + whole + (self.rank < left))

    def weight(self, samples: int) -> float:
        """Return the share that this rank's mean has in the mean over a batch.

        >>> Part(0, 2).weight(5), Part(0, 4).weight(8)
        (0.6, 0.25)
        """
        found = self.of(samples)
        return float(found.stop - found.start) / samples

    def take(self, chosen: list[Any]) -> list[Any]:
        """Return this rank's of the chosen samples; one that weighs nothing where it has none."""
        return chosen[self.of(len(chosen))] or chosen[:1]


@dataclass(frozen=True, slots=True)
class Share:
    """What this rank has of one batch."""

    own: int
    """Samples."""
    weight: float
    """Of their mean in the mean over the batch."""
    is_part: bool
    """Whether other ranks have other samples of it."""


def part_of_batch(batch: Any, part: Part, samples: int) -> Any:
    """Return this rank's part of a batch that was made whole: tensors by their first dimension.

    Raises:
        ValueError: where the batch holds nothing that is cut so, or something that cannot be.
    """
    where = part.of(samples)
    if where.start == where.stop:
        where = slice(0, 1)
    found = 0

    def cut(item: Any) -> Any:
        nonlocal found
        if isinstance(item, torch.Tensor | np.ndarray):
            is_cut = bool(item.ndim) and len(item) == samples
            found += is_cut
            if is_cut and isinstance(item, torch.Tensor) and item.requires_grad:
                return _Cut.apply(item, part)  # type: ignore[no-untyped-call]
            return item[where] if is_cut else item
        if isinstance(item, list | tuple) and len(item) == samples and not _holds_tensors(item):
            return item[where]
        if item is not None and not isinstance(item, (*CONTAINERS, str, bytes, int, float)):
            raise ValueError(f"a batch with a {type(item).__name__} cannot be cut")
        return item

    cut_batch = _changed(batch, cut)
    if not found:
        raise ValueError("the batch holds no tensor with one row a sample")
    return cut_batch


def _changed(item: Any, change: Callable[[Any], Any]) -> Any:
    """Return an item changed; a container that is left as it is with its entries changed."""
    made = change(item)
    if made is not item or not isinstance(item, CONTAINERS):
        return made
    if isinstance(item, Mapping):
        entries = {key: _changed(value, change) for key, value in item.items()}
        return entries if type(item) is dict else type(item)(entries)  # type: ignore[call-arg]
    values = [_changed(value, change) for value in item]
    return type(item)(*values) if hasattr(item, "_fields") else type(item)(values)


def _holds_tensors(items: Sequence[Any]) -> bool:
    return any(isinstance(one, torch.Tensor | Mapping) for one in items)


def agree_on_streams() -> None:
    """Let every rank draw from where the random streams of rank 0 are."""
    found = [Streams()]
    dist.broadcast_object_list(found, 0)
    found[0].set_back()


class SharedStreams:
    """Random streams that all ranks draw from alike, apart from those that are each rank's own.

    Samplers choose by the shared ones, so all ranks choose the same, and so does what the script
    draws between two epochs: a split of the data, another model. Dropout and random augmentation
    draw from the rank's own, so they differ from rank to rank. Until `split` there is
    one stream, alike on all ranks: a script that makes its batches itself draws them from it.
    """

    def __init__(self, part: Part) -> None:
        self.rank = part.rank
        self.shared: Streams | None = None
        self.is_between = False
        """Whether an epoch is over, and no part of a batch was drawn since."""
        self._own: Streams | None = None

    def split(self) -> None:
        """Give this rank streams of its own from now on."""
        if self.shared is None:
            self.shared = Streams()
            if self.rank:
                seed_all(_rank_seed(self.rank))

    def install(self) -> None:
        """Let what the script seeds, saves and puts back be the streams that all ranks share."""
        for owner in (torch, torch.random):
            patching.wrap(owner, "manual_seed", self._seeding)
            patching.wrap(owner, "get_rng_state", self._reading)
            patching.wrap(owner, "set_rng_state", self._seeding)

    def _seeding(self, seed: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(seed)
        def seeded(*args: Any, **kwargs: Any) -> Any:
            result = seed(*args, **kwargs)
            is_inside = self._own is not None and not self.is_between
            if self.shared is None or is_inside or not _is_scripts(sys._getframe(1)):
                return result
            own = shared = torch.default_generator.get_state()
            if self.rank:
                own = torch.Generator().manual_seed(_rank_seed(self.rank)).get_state()
            if self._own is not None:
                self._own.torch = own
            else:
                self.shared.torch = shared
                torch.default_generator.set_state(own)
            return result

        return seeded

    def _reading(self, read: Callable[[], Any]) -> Callable[[], Any]:
        @functools.wraps(read)
        def state() -> Any:
            if self.shared is None or self.is_between or not _is_scripts(sys._getframe(1)):
                return read()
            return self.shared.torch.clone()

        return state

    def begin(self) -> None:
        """Draw from the shared streams until `end`."""
        if self.is_between:  # by numbers of its own a rank may have drawn something more
            agree_on_streams()
        elif self.shared is not None:
            self._own = Streams()
            self.shared.set_back()

    def end(self) -> None:
        """Draw from the rank's own streams again, within an epoch."""
        if self._own is not None and not self.is_between:
            self.shared = Streams()
            self._own.set_back()
            self._own = None

    def end_epoch(self) -> None:
        """Draw from the shared streams until `begin_epoch`.

        Accelerate draws ahead: there the last step's dropout is alike on the ranks.
        """
        if self.shared is not None and self._own is None:
            self.begin()
            self.is_between = True

    def begin_epoch(self) -> None:
        """Draw from the rank's own streams again, at the first part of a batch."""
        if self.is_between:
            self.is_between = False
            self.end()

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Draw from the shared streams inside; a block inside another one does nothing more."""
        if self._own is not None:
            yield
            return
        self.begin()
        try:
            yield
        finally:
            self.end()


def _rank_seed(rank: int) -> int:
    return (torch.initial_seed() + rank * RANK_SEEDS) % 2**63


def _is_scripts(frame: FrameType) -> bool:
    """Return whether the script calls: torch itself puts states back, as checkpointing does."""
    module = str(frame.f_globals.get("__name__", ""))
    return not module.startswith(("torch.", "flatout."))


class RankSeeds:
    """A `worker_init_fn` that gives the workers of each rank streams of their own."""

    def __init__(self, rank: int, then: Any) -> None:
        self.rank, self.then = rank, then

    def __call__(self, worker: int) -> None:
        """Seed a worker that starts, and then do what the script wants."""
        seed = _rank_seed(self.rank)
        seed_all(seed)
        object.__setattr__(get_worker_info(), "seed", seed)
        if self.then is not None:
            self.then(worker)


class Feed:
    """What one loader gives to this rank."""

    def __init__(self, part: Part, *, cuts_batches: bool) -> None:
        self.part = part
        self.cuts_batches = cuts_batches
        """Whether batches are made whole and cut: those of streams, and of samplers of no lists."""
        self.trains = False
        """Whether a backward followed a batch of it."""
        self.shares = False
        """Whether batches that are chosen from now on are shared out."""
        self.sizes: deque[tuple[int, int]] = deque()
        """Of the chosen batches that the loop has not had yet: samples, and how many of them are
        this rank's."""
        self.is_used = True
        """Whether a backward followed the last batch that was shared out."""
        self.is_grouped = False
        """Whether the loop draws those of a step before it works on the first of them."""
        self.is_whole = False
        """Whether its batches stay whole for good, since they cannot be cut."""
        self.chosen = 0
        """Checksum of the numbers of all samples that were chosen."""


class SharedBatches:
    """A batch sampler's batches, of which each rank gets its part."""

    def __init__(self, batches: Any, feed: Feed, streams: SharedStreams) -> None:
        self.batches, self.feed, self.streams = batches, feed, streams

    def __iter__(self) -> Iterator[Any]:
        self.feed.sizes.clear()
        with self.streams.drawing():
            source = iter(self.batches)
        return self._choose(source)

    def _choose(self, source: Iterator[Any]) -> Iterator[Any]:
        feed = self.feed
        while True:
            with self.streams.drawing():
                chosen = next(source, None)
            if chosen is None:
                return
            if isinstance(chosen, list) and all(isinstance(x, int | np.integer) for x in chosen):
                feed.chosen = zlib.crc32(np.asarray(chosen, dtype=np.int64).tobytes(), feed.chosen)
            is_list = isinstance(chosen, list)
            own = feed.part.take(chosen) if feed.shares and is_list and chosen else chosen
            feed.sizes.append((len(chosen), len(own)) if is_list else (0, 0))
            yield own

    def __len__(self) -> int:
        return len(self.batches)

    def __getattr__(self, name: str) -> Any:
        if name == "batches":  # a copy that has nothing yet
            raise AttributeError(name)
        return getattr(self.batches, name)


class Feeds:
    """All loaders of this rank, and which part of which batch the loop works on."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.streams: SharedStreams | None = None
        self.by_loader: weakref.WeakKeyDictionary[Any, Feed] = weakref.WeakKeyDictionary()
        self.drawn: dict[int, _SharedIterator] = {}
        """The iterators that gave batches since the last backward."""
        self.worked_on = 0
        """Rows in the last training call of a model; 0 where that was not seen."""
        self.views = {1}
        """Rows that models are called with for each sample of a batch: two for SimCLR, or for a
        discriminator with true and made samples at once."""
        self.first_part: tuple[int, int] | None = None
        """Samples of the first batch that was shared out, and how many of them are here."""
        self.has_trained_on_parts = False
        """Whether a backward followed it."""
        self.backwards = 0
        """Since the last step of an optimizer."""

    @property
    def is_fed(self) -> bool:
        """Whether a loader feeds the training: one that did, or gave a batch since the last step.

        Of an evaluation in between nothing is left when the training goes on.
        """
        is_known = any(feed.trains for feed in self._held())
        return is_known or any(iterator.count for iterator in self.drawn.values())

    @property
    def chosen(self) -> int:
        """A checksum of the samples that the loaders of the training chose, whole batches each."""
        return sum(feed.chosen for feed in self._held() if feed.trains)

    def _held(self) -> set[Feed]:
        """Return what loaders give: one that a `for` makes is gone while its iterator goes on."""
        return {*self.by_loader.values(), *(iterator.feed for iterator in self.drawn.values())}

    def begin(self, loader: Any, *, is_training: bool) -> None:
        """Make a loader ready for an iterator, which is then made from the shared streams."""
        if self.streams is None:
            self.streams = SharedStreams(self.part)
            self.streams.install()
        feed = self.by_loader.get(loader)
        if feed is None:
            is_stream = isinstance(loader.dataset, IterableDataset)
            feed = Feed(self.part, cuts_batches=is_stream or loader.batch_sampler is None)
            self.by_loader[loader] = feed
            if not feed.cuts_batches:
                shared = SharedBatches(loader.batch_sampler, feed, self.streams)
                loader.__dict__["batch_sampler"] = shared  # DataLoader forbids setting it
        feed.shares = feed.trains and is_training
        self.streams.begin()

    def iterate(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Return the iterator that the loop draws from; it was made since `begin`."""
        if self.streams is not None:
            self.streams.end()
        return _SharedIterator(batches, self.by_loader[loader], self)

    def had(self, iterator: "_SharedIterator", samples: int, own: int) -> None:
        """Note that the loop has a batch, of how many samples, and how many of them are here."""
        feed, is_shared = iterator.feed, own < samples
        if is_shared and not feed.is_used and not feed.is_grouped:
            say_once(
                "batches of the training loader were drawn without a backward: what the script "
                "counted of them is of this rank's part only"
            )
        feed.is_used = not is_shared
        if is_shared and self.first_part is None:
            self.first_part = samples, own
        weight = self.part.weight(samples) if is_shared else 1 / self.part.ranks
        iterator.latest.append(Share(own, weight, is_shared))
        iterator.count += torch.is_grad_enabled()
        iterator.since_step += torch.is_grad_enabled()
        key = id(iterator)
        self.drawn.pop(key, None)  # the latest comes last
        self.drawn[key] = weakref.proxy(iterator, lambda _: self.drawn.pop(key, None))

    def share(self) -> "Share":
        """Return this rank's share in the batch worked on.

        That is the latest one with as many samples as the model was called with: Accelerate draws
        one batch ahead, and the last one of an epoch is mostly smaller.
        """
        nothing = Share(0, 1 / self.part.ranks, is_part=False)
        latest = [one for iterator in self.drawn.values() for one in iterator.latest] or [nothing]
        last, rows = latest[-1], self.worked_on
        if any(last.own * views == rows for views in self.views):
            return last
        fitting = [one for one in latest if one.own == rows]
        if rows and last.own and not fitting and rows % last.own == 0:
            self.views.add(rows // last.own)
        return (fitting or latest)[-1]

    def trained(self) -> None:
        """Note a backward: a loader that gave one batch since the last one feeds the training.

        What only looks at data, or evaluates, draws several, or lets go of its iterator.
        """
        for iterator in self.drawn.values():
            feed = iterator.feed
            if iterator.count == 1 and not feed.is_whole:
                feed.trains = feed.shares = True
            iterator.count, feed.is_used = 0, True
        if self.streams is not None and self.is_fed:
            self.streams.split()
        self.has_trained_on_parts |= self.first_part is not None
        self.backwards += 1

    def stepped(self) -> None:
        """Note a step: a loader that gave a batch for each backward of it feeds the training, too.

        So it is where the batches of a step are drawn before the first of them is worked on.
        """
        for iterator in self.drawn.values():
            if 1 < iterator.since_step == self.backwards and not iterator.feed.is_whole:
                iterator.feed.trains = iterator.feed.shares = iterator.feed.is_grouped = True
            iterator.since_step = 0
        self.backwards = 0


class _SharedIterator:
    """A loader's iterator that notes how each batch was shared out, and cuts whole ones."""

    def __init__(self, batches: Iterator[Any], feed: Feed, feeds: Feeds) -> None:
        self.batches, self.feed, self.feeds = batches, feed, feeds
        self.latest: deque[Share] = deque(maxlen=LATEST)
        """Of the latest batches what is here of them."""
        self.count = 0
        """Batches since the last backward, drawn while gradients were on."""
        self.since_step = 0
        """The same since the last step."""

    def __iter__(self) -> "_SharedIterator":
        return self

    def __next__(self) -> Any:
        feed, feeds = self.feed, self.feeds
        streams = feeds.streams
        assert streams is not None
        if feed.shares:
            streams.begin_epoch()
        try:
            if not feed.cuts_batches:
                batch = next(self.batches)
                feeds.had(self, *(feed.sizes.popleft() if feed.sizes else (0, 0)))
                return batch
            with streams.drawing():  # a stream in this process draws alike on every rank
                batch = next(self.batches)
        except StopIteration:
            self.count += 2  # whoever draws to the end before a backward does not train
            if feed.shares:
                streams.end_epoch()
            raise
        samples = own = leading_size(batch)
        if feed.shares and samples:
            try:
                batch = part_of_batch(batch, feed.part, samples)
                own = max(1, len(range(samples)[feed.part.of(samples)]))
            except ValueError as error:
                say(f"each rank trains on whole batches, which gains nothing: {error}")
                feed.is_whole, feed.trains, feed.shares = True, False, False
        feeds.had(self, samples, own)
        return batch

    def __len__(self) -> int:
        return len(self.batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "batches":
            raise AttributeError(name)
        return getattr(self.batches, name)


class _Gather(torch.autograd.Function):
    """The rows of all ranks, in order; each rank goes on with all of them, alike.

    So every rank has the gradient of all rows, and its own part times the ranks is what the ranks'
    gradients sum up to: nothing is sent in backward.
    Forward and backward are made of this and of `_Cut`, so gradients of gradients are right, too.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part = part
        found = [torch.empty_like(rows) for _ in range(part.ranks)]
        dist.all_gather(found, rows)
        return torch.cat(found)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        own = _Cut.apply(grad, ctx.part)  # type: ignore[no-untyped-call]
        return own * ctx.part.ranks, None


class _Cut(torch.autograd.Function):
    """This rank's rows of a tensor that is alike on all ranks, as what another model gave is.

    Each rank has the gradient of its own rows alone, times the ranks: those of all of them, put
    together and divided by the ranks, are that of the tensor, and alike again.
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, part: Part) -> torch.Tensor:
        ctx.part = part
        return whole[part.of(len(whole))].clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole = _Gather.apply(grad.contiguous(), ctx.part)  # type: ignore[no-untyped-call]
        return whole / ctx.part.ranks, None


def gathered(output: Any, samples: int, part: Part) -> Any:
    """Return the outputs of all ranks' parts, of so many samples each, as of one batch.

    Rows are put together in order of the ranks, numbers (a loss) averaged. Gradients flow back to
    each rank's own part, summed over the ranks: averaged as DDP does they are those of the batch.
    """

    def gather(item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        if item.ndim == 0 and item.is_floating_point():
            return _Gather.apply(item[None], part).mean()  # type: ignore[no-untyped-call]
        if item.ndim and len(item) == samples:
            sent = item.byte() if item.dtype == torch.bool else item
            rows = _Gather.apply(sent.contiguous(), part)  # type: ignore[no-untyped-call]
            return rows.to(item.dtype)
        return item

    return map_leaves(output, gather)


def leading(things: Sequence[Any]) -> int:
    """Return the first dimension that all tensors among the arguments of a call share, else 0."""
    sizes = {len(one) for one in things if isinstance(one, torch.Tensor) and one.ndim}
    return sizes.pop() if len(sizes) == 1 else 0
