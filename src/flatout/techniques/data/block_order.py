"""Read a shuffled store in blocks of neighbours, mixed in windows.

What it does: replaces the loader's random sampler by one that shuffles blocks of 8 to 16 samples
and then the samples of a window of 4,096 or more, and lets the kernel read a window ahead.
When it helps: a packed store larger than memory, on storage that is slow at random reads.
What it costs: page cache for two windows.
How it is checked: every sample comes once an epoch; all ranks change their order or none; only on
a store that was shuffled when it was packed, whose labels fall into batches as by a uniform
shuffle. The order is another one than the script's, so it has to be asked for.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

import numpy as np

from flatout.data.packed_store import PackedStore
from flatout.data.sampler import (
    MAX_BLOCK,
    MAX_VARIANCE_RATIO,
    MIN_BLOCK,
    MIN_WINDOW,
    block_permutation,
    variance_ratio,
)
from flatout.hardware.limits import host_memory_bytes, memory_limit_bytes
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique

if TYPE_CHECKING:
    from flatout.data.sampler import BlockSampler, OrderOptions

MIN_WAIT = 0.10
"""Share of the step below which reading faster is not worth another order."""
MIN_READ_SHARE = 0.20
"""Least share of a batch's making that reading takes, for reads to be the limit."""
GAIN = 2.5
"""Cold reads in blocks against random ones: 685 against 248 MB/s measured (research on the input
pipeline, virtual disk)."""
MAX_RESIDENT = 0.5
"""From half of the store in the page cache on, most reads are not cold."""
MEMORY_SHARE = 0.25
"""Of the memory, for two windows of the store in the page cache."""
BATCHES_JUDGED = 400
"""Of the first epoch, to see how labels fall into batches."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder(Technique):
    """Read a shuffled store in blocks, mixed in windows."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "blocked_reads"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    stages: ClassVar[tuple[str, ...]] = ("read",)
    by_hand: ClassVar[str] = """
With a packed store as data set; where each epoch has a loader of its own, make one sampler for all:
+ from flatout.techniques.data.block_order import block_sampler
- DataLoader(dataset, shuffle=True, ...)
+ DataLoader(dataset, sampler=block_sampler(dataset, block=$block, window=$window), ...)
"""

    block: int = MAX_BLOCK
    """Samples that are read together."""
    window: int = MIN_WINDOW
    """Samples that are mixed."""

    def __post_init__(self) -> None:
        if not MIN_BLOCK <= self.block <= MAX_BLOCK:
            raise ValueError(f"block={self.block} must be between {MIN_BLOCK} and {MAX_BLOCK}")
        if self.window < MIN_WINDOW or self.window % self.block:
            raise ValueError(
                f"window={self.window} must be a multiple of {self.block}, {MIN_WINDOW} or more"
            )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["BlockOrder"]:
        """Return the technique when batches wait for storage, as was measured."""
        del machine
        journey = profile.journey
        if journey is None or profile.share("data_wait") < MIN_WAIT:
            return ()
        from_storage = sum(facts.storage_bytes_per_step or 0.0 for facts in journey.workers)
        return [cls()] if from_storage and _read_share(profile) >= MIN_READ_SHARE else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Let the reading take as much less time as cold blocks were seen to."""
        del machine
        read_ms = _read_share(profile) * profile.phases_ms["data_wait"]
        return Effect(
            step_ms=-read_ms * (1 - 1 / GAIN),
            why=f"{read_ms:.1f} ms of waiting for cold reads, {GAIN} times as fast in blocks",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the block sampler in the place of the random one."""
        from torch.utils.data import RandomSampler

        from flatout.data.sampler import OrderOptions

        seed, (rank, world_size) = _sharing(arguments)
        batch_size = arguments.get("batch_size")
        if not batch_size:
            raise NotApplicable("the loader has a batch sampler of its own")
        options = OrderOptions(
            seed=seed, rank=rank, world_size=world_size, block=self.block, window=self.window
        )
        replaced = arguments.get("sampler")
        if replaced is None:
            replaced = RandomSampler(arguments["dataset"], generator=arguments.get("generator"))
        sampler = _checked_sampler(arguments["dataset"], options, batch_size, replaced=replaced)
        return {**arguments, "sampler": sampler, "shuffle": False}


def block_sampler(
    dataset: Any,
    *,
    block: int = MAX_BLOCK,
    window: int = MIN_WINDOW,
    batch_size: int = 256,
    ranks: tuple[int, int] = (0, 1),
    seed: int = 0,
) -> Any:
    """Return a sampler in block order for a data set that reads from a packed store.

    It counts its epochs from 0: make it once, or tell a new one by `set_epoch` which comes next.

    Args:
        dataset: what `flatout.data.open` gave, a data set with packed_data, or one that makes its
            sample i of sample i of such a data set.
        block: samples that are read together.
        window: samples that are mixed.
        batch_size: of one rank.
        ranks: this process's rank and the number of ranks.
        seed: of the order, the same on all ranks.

    Raises:
        NotApplicable: if there is no such store, it is not shuffled, or its reads are not cold;
            of several ranks on all of them, whichever it is.
    """
    from flatout.data.sampler import OrderOptions

    rank, world_size = ranks
    options = OrderOptions(seed=seed, rank=rank, world_size=world_size, block=block, window=window)
    return _checked_sampler(dataset, options, batch_size)


def _checked_sampler(
    dataset: Any, options: "OrderOptions", batch_size: int, *, replaced: Any = None
) -> "BlockSampler":
    """Return the sampler of a store whose order mixes well and whose reads are cold.

    All ranks have one or none has: one that kept the script's order would take others' samples.

    Args:
        dataset: as for `block_sampler`.
        options: of the order.
        batch_size: of one rank.
        replaced: the script's own sampler, whose `set_epoch` it goes on to call, or whose stream
            gives the numbers of the epochs.

    Raises:
        NotApplicable: as for `block_sampler`.
    """
    from flatout.data.proof.agreement import agree, group_size

    ranks = max(options.world_size, group_size())
    if ranks == 1:
        return _own_sampler(dataset, options, batch_size, replaced)
    try:
        sampler = _own_sampler(dataset, options, batch_size, replaced)
    except Exception as reason:
        # The others wait for this rank's word, whatever is in its way.
        agree("", str(reason) or type(reason).__name__, ranks=ranks)
        raise
    agree(_claim(sampler), "", ranks=ranks)
    return sampler


def _own_sampler(
    dataset: Any, options: "OrderOptions", batch_size: int, replaced: Any
) -> "BlockSampler":
    """Return the sampler if nothing on this rank's host is in its way.

    Raises:
        NotApplicable: as for `block_sampler`.
    """
    from flatout.data.dataset_matching import store_behind
    from flatout.data.sampler import BlockSampler

    behind = store_behind(dataset)
    _check_mixing(behind.store, options.block, options.window, batch_size * options.world_size)
    _check_cold(behind.store, options.window)
    return BlockSampler(behind.store, options, is_reordered=behind.is_reordered, replaced=replaced)


def _claim(sampler: "BlockSampler") -> str:
    """Return what is the same on ranks whose samplers share one order: its seed and its store.

    Hosts may have packed the data set each for itself, and shuffled it otherwise.
    """
    store, options = sampler.store, sampler.options
    check = zlib.crc32(np.ascontiguousarray(store.index["original"]).tobytes())
    known = (len(store), check, options.seed, options.world_size, options.block, options.window)
    return " ".join(map(str, known))


def _sharing(arguments: Mapping[str, Any]) -> tuple[int, tuple[int, int]]:
    """Return the seed, and rank and ranks, of a loader that shuffles and may do it otherwise.

    Raises:
        NotApplicable: if it does not shuffle, samples in a way of its own, or is one of several
            ranks that have no order in common.
    """
    from torch.utils.data import DistributedSampler, RandomSampler

    from flatout.data.sampler import check_alone

    sampler = arguments.get("sampler")
    is_random = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and len(sampler) == len(arguments["dataset"])
    )
    if is_random or (sampler is None and arguments.get("shuffle")):
        check_alone()
        return 0, (0, 1)  # the sampler draws for each epoch
    if type(sampler) is DistributedSampler and sampler.shuffle:
        if len(arguments["dataset"]) % sampler.num_replicas:
            raise NotApplicable(
                f"{len(arguments['dataset'])} samples cannot be shared evenly by "
                f"{sampler.num_replicas} ranks without repeating some"
            )
        return sampler.seed, (sampler.rank, sampler.num_replicas)
    raise NotApplicable("the loader does not shuffle, or samples in a way of its own")


def _check_mixing(store: PackedStore, block: int, window: int, batch_size: int) -> None:
    """Make sure that batches will be like those of a uniform shuffle.

    Raises:
        NotApplicable: if the store is sorted, or classes bunch in batches.
    """
    if store.header.order != "shuffled":
        raise NotApplicable(
            "the store has the order of its source: blocks of it are of few classes; pack it again "
            "without --keep-order"
        )
    if len(store) < 2 * window:
        raise NotApplicable(f"{len(store)} samples are less than two windows of {window}")
    labels = store.labels()
    if labels is None:
        return
    order = block_permutation(len(store), seed=0, epoch=0, block=block, window=window)
    ratio = variance_ratio(labels[order[: BATCHES_JUDGED * batch_size]], batch_size)
    if ratio > MAX_VARIANCE_RATIO:
        raise NotApplicable(
            f"classes fall into batches {ratio:.1f} times as unevenly as by a uniform shuffle"
        )


def _check_cold(store: PackedStore, window: int) -> None:
    """Make sure that reads are cold, and that two windows find room.

    Raises:
        NotApplicable: if the store is in the page cache, or a window is too large for it.
    """
    from flatout.data.packed_store import resident_share

    paths = [store.folder / shard.name for shard in store.header.shards]
    share = resident_share(paths)
    if share is not None and share > MAX_RESIDENT:
        raise NotApplicable(
            f"{share:.0%} of the store is in memory: random reads cost no more than those in blocks"
        )
    mean = sum(shard.bytes for shard in store.header.shards) / len(store)
    room = min(host_memory_bytes(), memory_limit_bytes() or host_memory_bytes())
    if 2 * window * mean > MEMORY_SHARE * room:
        raise NotApplicable(
            f"two windows of {window} samples are {2 * window * mean / 1e9:.1f} GB, more than "
            f"{MEMORY_SHARE:.0%} of the memory"
        )


def _read_share(profile: Profile) -> float:
    """Return the share of making batches that is reading."""
    legs = profile.journey.legs if profile.journey else ()
    made = sum(leg.ms for leg in legs if leg.name in ("read", "decode", "collate"))
    read = sum(leg.ms for leg in legs if leg.name == "read")
    return read / made if made else 0.0
