"""What a `DataLoader` draws from: a global order in batches and ranks, that can be resumed.

`GlobalOrder` and `BlockSampler` take the order of an epoch from `permutation` or
`block_permutation`: functions of seed and epoch, and nothing else. Both sort keys of a
counter-based generator (Philox), whose stream NumPy promises to keep. `sample_seed` and `seeded` do
the same for augmentation, for any data set.

`spread_windows` is the block order of samples that were not shuffled before they were stored, and
`unevenness` the number that says how well an order mixes.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatout.data.packed_store import PackedStore
from flatout.records.errors import NotApplicable, UserError

Places = np.ndarray[tuple[int], np.dtype[np.int64]]
MIN_BLOCK, MAX_BLOCK = 8, 16
"""Samples in a block: 0.6 to 1.2 MB of photographs are read in one go."""
MIN_WINDOW = 4096
"""Samples that are mixed: 16 batches of 256 or more; below, batches of two epochs resemble each
other (0.060 of a batch stays together at 4,096, 0.044 by chance)."""
ORDERS, BLOCKS, WINDOWS, SAMPLES = range(4)
"""What a stream of keys is for: streams of one seed never repeat each other."""


def permutation(samples: int, *, seed: int, epoch: int) -> Places:
    """Return every number below `samples` once, shuffled.

    >>> permutation(5, seed=0, epoch=0).tolist() == permutation(5, seed=0, epoch=0).tolist()
    True
    >>> sorted(permutation(5, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4]
    """
    return _sorted_keys(samples, seed, epoch, ORDERS)


def block_permutation(
    samples: int, *, seed: int, epoch: int, block: int = MAX_BLOCK, window: int = MIN_WINDOW
) -> Places:
    """Return every number below `samples` once; blocks shuffled, then samples inside windows.

    Only right for a store that is shuffled itself.

    Samples that are side by side in a pre-shuffled store stay together: blocks are shuffled, and so
    are the samples in a window of many blocks.
    """
    _check_blocks(block, window)
    blocks = _sorted_keys(-(-samples // block), seed, epoch, BLOCKS)
    spread = (blocks[:, None] * block + np.arange(block)).ravel()
    places: Places = spread[spread < samples]
    keys = _keys(samples, seed, epoch, WINDOWS)
    for start in range(0, samples, window):
        inside = slice(start, start + window)
        places[inside] = places[inside][np.argsort(keys[inside], kind="stable")]
    return places


def spread_windows(
    samples: int, *, seed: int, epoch: int, block: int = MAX_BLOCK, window: int = MIN_WINDOW
) -> list[Places]:
    """Return every number below `samples` once, in windows of about `window` samples.

    For samples of which neighbours are alike, as files of one class are in a folder: of as many
    blocks side by side as there are windows each window gets one, drawn by lot. So a window has
    samples from everywhere, more evenly than by a shuffle; inside it they are shuffled.

    Raises:
        ValueError: if the blocks are too large, or the window too small, to mix well.
    """
    _check_blocks(block, window)
    num_windows, num_blocks = max(1, round(samples / window)), -(-samples // block)
    rows = -(-num_blocks // num_windows)
    lots = _keys(rows * num_windows, seed, epoch, BLOCKS).reshape(rows, num_windows)
    window_of_block = np.argsort(lots, axis=1, kind="stable").ravel()[:num_blocks]
    window_of = np.repeat(window_of_block, block)[:samples]
    order = np.lexsort((_keys(samples, seed, epoch, WINDOWS), window_of))
    ends = np.cumsum(np.bincount(window_of, minlength=num_windows)).tolist()
    return [order[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]


def _check_blocks(block: int, window: int) -> None:
    if not 1 <= block <= MAX_BLOCK:
        raise ValueError(f"block={block} must be between 1 and {MAX_BLOCK}")
    if window < MIN_WINDOW or window % block:
        raise ValueError(f"window={window} must be a multiple of {block}, {MIN_WINDOW} or more")


def unevenness(labels: Any, batch_size: int) -> float:
    """Return how unevenly classes fall into batches, over what a uniform shuffle does.

    The spread of the classes' counts in a batch, all classes together, over the hypergeometric one
    of drawing without replacement: 1 is a uniform shuffle, less is more even.

    >>> unevenness([0, 1] * 8, 4), unevenness([0] * 8 + [1] * 8, 4)
    (0.0, 5.0)

    Args:
        labels: the class of each sample, in the order in which they come.
        batch_size: samples of a batch; a last one that is not full is left out.
    """
    whole = len(labels) // batch_size * batch_size
    classes = np.unique(np.asarray(labels)[:whole], return_inverse=True)[1].reshape(-1)
    if whole < 2 * batch_size or not classes.any():
        return 1.0
    together = float(((np.bincount(classes) / whole) ** 2).sum())
    cells = np.arange(whole) // batch_size * (classes.max() + 1) + classes
    counts = np.unique(cells, return_counts=True)[1].astype(float)
    measured = (counts**2).sum() / (whole // batch_size) - batch_size**2 * together
    expected = batch_size * (1 - together) * (whole - batch_size) / (whole - 1)
    return float(measured / expected)


def sample_seed(seed: int, epoch: int, sample: int) -> int:
    """Return the 63 bits that a sample's augmentation is drawn from in an epoch.

    >>> len({sample_seed(0, epoch, sample) for epoch in range(3) for sample in range(100)})
    300
    """
    counter = [0, sample, epoch, SAMPLES]
    drawn = np.random.Philox(key=seed % 2**64, counter=counter).random_raw()
    return int(drawn) >> 1


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Let `random`, NumPy and torch draw from a seed inside; their streams stay where they are."""
    import random

    import torch

    from flatout.data.proof.random_streams import Streams

    streams = Streams()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        streams.set_back()


def _sorted_keys(count: int, seed: int, epoch: int, purpose: int) -> Places:
    order: Places = np.argsort(_keys(count, seed, epoch, purpose), kind="stable")
    return order


def _keys(count: int, seed: int, epoch: int, purpose: int) -> np.ndarray[Any, np.dtype[np.uint64]]:
    """Return that many 64-bit keys; epoch and purpose are the high words of the counter."""
    philox = np.random.Philox(key=seed % 2**64, counter=[0, 0, epoch, purpose])
    return np.asarray(philox.random_raw(count), dtype=np.uint64)


AHEAD_SLOTS = 64
"""Slots between two requests to read ahead: about a batch: reading comes in no bursts."""
ALL_RANKS = "WORLD_SIZE"
"""How many ranks train together; set by launchers, before a script makes its process group."""


class Slot(int):
    """The number of a sample that also knows its epoch, and takes that to a worker process."""

    epoch: int

    def __new__(cls, sample: int, epoch: int) -> "Slot":
        """Return the number with its epoch."""
        slot = super().__new__(cls, sample)
        slot.epoch = epoch
        return slot

    def __reduce__(self) -> tuple[Any, ...]:
        return Slot, (int(self), self.epoch)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainShuffle:
    """What a loader asks for that draws each sample once an epoch, in random order."""

    batch_size: int
    drop_last: bool
    generator: Any
    """What the script gave it to draw from; None for the global stream."""


def plain_shuffle(arguments: Mapping[str, Any]) -> PlainShuffle:
    """Return what a loader's arguments ask for.

    Raises:
        NotApplicable: if that is another order than a plain shuffle, or a rank's part of one.
    """
    from torch.utils.data import BatchSampler, RandomSampler

    batch_sampler, sampler = arguments.get("batch_sampler"), arguments.get("sampler")
    size, drops = arguments.get("batch_size", 1), bool(arguments.get("drop_last"))
    if batch_sampler is not None:
        if type(batch_sampler) is not BatchSampler:
            raise NotApplicable(f"{type(batch_sampler).__name__} makes batches in a way of its own")
        sampler, size = batch_sampler.sampler, batch_sampler.batch_size
        drops = batch_sampler.drop_last
    is_shuffled = bool(arguments.get("shuffle")) or type(sampler) is RandomSampler
    if not is_shuffled or not isinstance(size, int) or size < 2:
        raise NotApplicable("the order is not a plain shuffle, so it is kept")
    if sampler is not None and (
        sampler.replacement or sampler.num_samples != len(arguments["dataset"])
    ):
        raise NotApplicable("the sampler does not draw each sample once")
    check_alone()
    generator = getattr(sampler, "generator", None) or arguments.get("generator")
    return PlainShuffle(batch_size=size, drop_last=drops, generator=generator)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderOptions:
    """How the samples of an epoch are ordered and shared."""

    seed: int = 0
    rank: int = 0
    world_size: int = 1
    drop_last: bool = False
    """Leave out the last batch where it is not full."""
    block: int = 0
    """Samples of a store that stay together; 0 for a full permutation."""
    window: int = MIN_WINDOW
    """Samples that blocks are mixed in."""

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank={self.rank} must be between 0 and {self.world_size - 1}")

    def places(self, samples: int, epoch: int) -> Places:
        """Return the order of an epoch, the same on every rank."""
        if not self.block:
            return permutation(samples, seed=self.seed, epoch=epoch)
        return block_permutation(
            samples, seed=self.seed, epoch=epoch, block=self.block, window=self.window
        )


def check_alone() -> None:
    """Make sure that the order this process draws is the only one of the training.

    No one sees to it that ranks draw the same order in the place of a `RandomSampler`: their seeds
    may differ, and so may what they drew before. Each would then take its part of another order,
    and samples would be missed. Accelerate shares a loader out like that after it was made.
    """
    from torch import distributed

    text = os.environ.get(ALL_RANKS, "")
    ranks = int(text) if text.isdigit() else 1
    if distributed.is_available() and distributed.is_initialized():
        ranks = max(ranks, distributed.get_world_size())
    if ranks > 1:
        raise NotApplicable(
            f"{ranks} ranks shuffle without a DistributedSampler: each could draw another order, "
            "and samples would be missed"
        )


class GlobalOrder:
    """A batch sampler: every sample once an epoch, in an order of seed and epoch alone.

    Rank r of w takes the slots r, r + w, ... of each global batch: so the samples of a global batch
    do not depend on the number of ranks. Its position is a few integers.

        order = GlobalOrder(len(data), 256, OrderOptions(seed=0))
        loader = DataLoader(data, batch_sampler=order, num_workers=4)
        for batch in order.follow(loader):
            ...
            checkpoint["order"] = order.state_dict()
    """

    def __init__(self, samples: int, batch_size: int, options: OrderOptions | None = None) -> None:
        self.samples, self.batch_size = samples, batch_size
        self.options = options or OrderOptions()
        self.epoch = 0
        self.next_batch = 0
        """Of the epoch; in global batches."""
        rest, ranks = samples % batch_size, self.options.world_size
        if batch_size < ranks or batch_size % ranks:
            raise UserError(f"a global batch of {batch_size} cannot be shared by {ranks} ranks")
        if 0 < rest < ranks and not self.options.drop_last:
            raise UserError(
                f"the last batch has {rest} samples for {ranks} ranks, and some would wait for "
                "ever; give drop_last=True"
            )

    @property
    def batches(self) -> int:
        """Global batches of an epoch, which every rank has its part of."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + int(bool(rest) and not self.options.drop_last)

    def __len__(self) -> int:
        return self.batches

    def __iter__(self) -> Iterator[list[Slot]]:
        """Give the batches of this rank from `next_batch` on; then the next epoch is due."""
        epoch, options = self.epoch, self.options
        places = options.places(self.samples, epoch)
        for number in range(self.next_batch, self.batches):
            batch = places[number * self.batch_size : (number + 1) * self.batch_size]
            yield [Slot(int(p), epoch) for p in batch[options.rank :: options.world_size]]
        if self.epoch == epoch:
            self.epoch, self.next_batch = epoch + 1, 0

    def follow(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Give the loader's batches and count them: loaders draw ahead of the loop."""
        epoch, number = self.epoch, self.next_batch
        for batch in loader:
            number += 1
            self.epoch, self.next_batch = epoch, number
            yield batch
        self.epoch, self.next_batch = epoch + 1, 0

    def state_dict(self) -> dict[str, int]:
        """Return which order it is, and where it is: epoch, next global batch."""
        return {**self._kind(), "epoch": self.epoch, "next_batch": self.next_batch}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on where another order stood; nothing is read or drawn again.

        Raises:
            UserError: if that was another order, or if it stood in an epoch of other batches.
        """
        mine = self._kind()
        if not state["next_batch"]:
            del mine["batch_size"]  # at the start of an epoch nothing was counted in batches
        for name, value in mine.items():
            # Checkpoints of flatout before this one say the seed alone.
            if state.get(name, value) != value:
                raise UserError(
                    f"the checkpoint's order has {name} {state[name]}, this one {value}: some "
                    "samples would come twice or never"
                )
        self.epoch, self.next_batch = int(state["epoch"]), int(state["next_batch"])

    def _kind(self) -> dict[str, int]:
        """Return what makes an order another one, and what it is counted in."""
        options = self.options
        return {
            "seed": options.seed,
            "samples": self.samples,
            "batch_size": self.batch_size,
            "block": options.block,
            "window": options.window if options.block else 0,
        }


class BlockSampler:
    """A sampler of single samples in block order; it lets the kernel read a window ahead."""

    def __init__(self, store: PackedStore, options: OrderOptions, *, is_reordered: bool) -> None:
        self.store, self.options = store, options
        self.is_reordered = is_reordered
        """Whether the data set numbers the samples as the source did."""
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch comes next, as for torch's `DistributedSampler`."""
        self.epoch = epoch

    def __len__(self) -> int:
        options = self.options
        return len(range(options.rank, len(self.store), options.world_size))

    def __iter__(self) -> Iterator[int]:
        # At once: a loop that leaves each epoch early has another order every time.
        epoch, self.epoch = self.epoch, self.epoch + 1
        options = self.options
        places = options.places(len(self.store), epoch)
        windows = [places[at : at + options.window] for at in range(0, len(places), options.window)]
        numbers = stored_numbers(self.store) if self.is_reordered else None
        will_need = self.store.will_need
        for place in reading_ahead(windows, will_need, will_need, options):
            yield Slot(place if numbers is None else int(numbers[place]), epoch)


def reading_ahead(
    windows: Sequence[Places],
    ask: Callable[[Places], Any],
    want: Callable[[Places], Any],
    options: OrderOptions,
) -> Iterator[int]:
    """Give the places of a rank, window by window; each window is read before it begins.

    Args:
        windows: the order of an epoch.
        ask: called once, with the first window in stored order: nothing comes before it is read.
        want: called with the next window's places bit by bit, in stored order, as this one goes.
        options: say which rank of how many it is.
    """
    begun = 0
    for number, window in enumerate(windows):
        if not number:
            ask(np.sort(window))
        mine = window[(options.rank - begun) % options.world_size :: options.world_size]
        begun += len(window)
        parts = max(1, len(mine) // AHEAD_SLOTS)
        coming = np.sort(windows[number + 1]) if number + 1 < len(windows) else window[:0]
        for places, wanted in zip(
            np.array_split(mine, parts), np.array_split(coming, parts), strict=True
        ):
            if len(wanted):
                want(wanted)
            yield from places.tolist()


def stored_numbers(store: PackedStore) -> Places:
    """Return the number of each place where samples are numbered as in the source.

    Samples that were left out when the store was packed have none: numbers have no holes.
    """
    numbers: Places = np.empty(len(store), dtype=np.int64)
    numbers[store.by_original] = np.arange(len(store))
    return numbers
