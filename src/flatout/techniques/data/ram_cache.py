"""Make each sample once and keep it in memory, as far as the memory goes.

What it does: asks the data set twice, in a forked copy of the process, whether it gives the same
samples each time. If so, whole samples are kept; if only what follows the decoding is random, the
pixels that Pillow decoded. The store is anonymous memory, shared by workers and epochs. Once the
script changes its data set, nothing that was kept is used any more.
When it helps: the step waits for reading and decoding, and the same files come in every epoch.
What it costs: host memory, at most the asked share of what is free; time at the start to fill it.
How it is checked: batches are bit-identical to those without; a random part is never kept.
"""

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, final
from weakref import WeakSet

from flatout.agent.worker_start import start_method
from flatout.analysis.feeding import MIN_WAIT_SHARE, fed_change_ms, loading, share_of
from flatout.analysis.journey import DECODED
from flatout.data.caching import (
    NO_WAY,
    ByteStore,
    cached,
    can_be_sent,
    fill,
    free_memory_bytes,
    is_cached,
    kept_or_made,
    local_ranks,
    processes_here,
    source_of,
    store_of,
    watch_of,
)
from flatout.data.images.pillow import keep_decoded, turn_keeping
from flatout.data.proof.changes import ChangeWatch
from flatout.data.proof.dataset_facts import DatasetFacts, Repeats, examine
from flatout.data.proof.forked import ForkedError, in_fork
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import LoaderFacts, Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state

READ_MS_PER_MB = 0.2
"""CPU time to copy a sample out of the store: 0.021-0.025 ms for 0.197 MB measured as a gather,
doubled for taking a sample apart (research on the input pipeline)."""
LEAST_SHARE = 0.10
"""A cache that holds less than a tenth of the set saves less than a tenth of the loading."""
DECODED_SAVED = 0.8
"""Of reading and decoding, what is left is the header and a copy of the pixels: 0.15 of 0.95 ms for
a photograph of 500x375 (measured, one core)."""
USUAL_DECODING = 0.35
"""Part of a loader's work that reading and decoding take where no one looked: 1.0 of 3.0 ms for
a classic pipeline (measured)."""
IN_MEMORY = "TensorDataset"
"""A data set whose samples are in memory already."""
KEPT = "_flatout_kept"
"""On a fetcher: the data set that it was given."""
SLOTS_A_KEY = 2
"""A table at half load finds a key in two looks."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RamCache(Technique):
    """Keep samples, or what was decoded for them, in memory."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "blocked_reads"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = (
        "read",
        "decode",
        "tokenise",
        "resize",
        "transform",
        "normalise",
        "python",
    )
    keeps_samples: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
For a data set that gives the same sample each time:
+ from flatout.techniques.data.ram_cache import cache_samples
+ dataset = cache_samples(dataset, budget_bytes=8 * 1024**3)
"""

    memory_share: float = 0.5
    """Share of the free host memory that the store may take, over all ranks of the host."""
    fill_s: float = 10.0
    """Longest time to fill the store before the first epoch; the rest comes as it is used."""
    kept: DatasetFacts[Any] = process_state(DatasetFacts)
    """What stands for each data set: one with a store, or itself where its pixels are kept."""
    decoded: list[ByteStore] = process_state(list)
    """The store for decoded pixels: one for all loaders."""
    watches: WeakSet[ChangeWatch] = process_state(WeakSet)
    """Of the data sets whose samples this process keeps."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_share <= 0.9:
            raise ValueError(f"memory_share={self.memory_share} must be above 0 and at most 0.9")
        if self.fill_s < 0:
            raise ValueError(f"fill_s={self.fill_s} must not be negative")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["RamCache"]:
        """Return the technique when the step waits for a set of which enough fits."""
        if profile.share("data_wait") < MIN_WAIT_SHARE or not profile.training_loaders:
            return ()
        loaders = profile.training_loaders
        if any(x.is_iterable or not x.dataset_len or x.dataset == IN_MEMORY for x in loaders):
            return ()
        kept = kept_share(profile.training_loaders, cls().memory_share * machine.memory_bytes)
        return [cls()] if kept >= LEAST_SHARE else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take the making of the kept samples away and put their copying in its place."""
        cores = machine.usable_cores
        kept = kept_share(profile.training_loaders, self.memory_share * machine.memory_bytes)
        made_ms = loading(profile, cores).total_ms
        copied_mb = sum(x.batch_bytes for x in profile.training_loaders) / 1e6
        share, what = 1.0, "the samples"
        if profile.pipeline is not None and profile.pipeline.is_repeated is False:
            share = DECODED_SAVED * share_of(profile, *DECODED, otherwise=USUAL_DECODING)
            what = "what is decoded for them, which is all that is the same each time,"
        else:
            share -= min(1.0, READ_MS_PER_MB * copied_mb / made_ms) if made_ms else 0.0
        per_step = max(1.0, profile.samples_per_step_per_rank)
        length = sum(loader.dataset_len or 0 for loader in profile.training_loaders)
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=kept * share, saved_blocked=kept),
            startup_s=min(self.fill_s, kept * length * made_ms / per_step / 1e3 / cores),
            why=f"{kept:.0%} of {what} kept: {share:.0%} of {made_ms:.1f} ms of loading per step",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the store in front of the data set, or of Pillow's decoding."""
        dataset = arguments["dataset"]
        if is_cached(dataset):
            return arguments  # a framework rebuilt a loader that already has the technique
        kept = self.kept.find(dataset, lambda: self._made(arguments))
        if is_cached(kept):
            check_workers(arguments)  # another loader of the same set may have others
        return {**arguments, "dataset": kept}

    def _made(self, arguments: Mapping[str, Any]) -> Any:
        """Return the data set with the store in front of it, or as it is once pixels are kept."""
        dataset = arguments["dataset"]
        check_dataset(dataset)
        check_workers(arguments)
        budget = int(self.memory_share * free_memory_bytes() / local_ranks())
        found = examine(dataset)
        if not found.is_same:
            self._keep_pixels(dataset, found, budget, spawns=_spawns(arguments))
            return dataset
        kept = _cached(dataset, found, budget)
        self.watches.add(watch_of(kept))
        return kept

    def _keep_pixels(
        self, dataset: Any, found: Repeats, budget_bytes: int, *, spawns: bool
    ) -> None:
        """Keep what Pillow decodes for a data set whose samples are random after that."""
        if "random" not in found.trouble and "each time" not in found.trouble:
            raise NotApplicable(found.trouble)
        if spawns:
            raise NotApplicable(
                f"{found.trouble}, and spawned workers would not share the decoding"
            )
        pixels = _pixels_of(dataset)
        if not pixels:
            raise NotApplicable(f"{found.trouble}, and Pillow decodes no file for it")
        if not self.decoded:
            length = len(dataset)
            needed = int(1.2 * length * (pixels + 128))
            if budget_bytes < LEAST_SHARE * needed:
                raise NotApplicable(f"{needed / 1e9:.1f} GB of pixels do not fit into the memory")
            store = ByteStore(slots=SLOTS_A_KEY * length, budget_bytes=min(needed, budget_bytes))
            keep_decoded(store)
            self.decoded.append(store)
        if self.fill_s > 0 and self.decoded[0].count == 0:
            fill(dataset.__getitem__, len(dataset), processes=processes_here(), limit_s=self.fill_s)

    def epoch(self, loader: Any) -> Any:
        """Fill the store before the first epoch, with all cores and for a bounded time."""
        if not is_cached(loader.dataset):
            self.kept.known(loader.dataset)
            return loader
        fill_store(loader.dataset, limit_s=self.fill_s)
        return loader

    def turn_in_fetcher(self, fetcher: Any, is_on: bool) -> None:  # noqa: FBT001
        """Draw from the kept samples or from the data set; let Pillow find kept pixels, or not."""
        kept = fetcher.__dict__.setdefault(KEPT, fetcher.dataset)
        if is_cached(kept):
            fetcher.dataset = kept if is_on else source_of(kept)
        for store in self.decoded:
            turn_keeping(store, is_on=is_on)

    def end(self) -> str:
        """Say what the script changed, if it did."""
        troubles = (watch.trouble for watch in self.watches if watch.trouble)
        return next((f"{trouble}: nothing kept was used from then on" for trouble in troubles), "")


def fill_store(dataset: Any, *, limit_s: float) -> None:
    """Make the samples of a kept data set in forked processes, unless some are there already."""
    watch = watch_of(dataset)
    if watch.is_changed():
        raise NotApplicable(watch.trouble)
    if store_of(dataset).count == 0 and limit_s > 0:
        make = partial(kept_or_made, dataset)
        fill(make, len(dataset), processes=processes_here(), limit_s=limit_s)


def cache_samples(dataset: Any, *, budget_bytes: int) -> Any:
    """Return a data set that makes each sample once and keeps it in memory shared by workers.

    Raises:
        NotApplicable: if its samples are not the same each time, or cannot be kept.
    """
    check_dataset(dataset)
    found = examine(dataset)
    if not found.is_same:
        raise NotApplicable(found.trouble)
    return _cached(dataset, found, budget_bytes)


def kept_share(loaders: Sequence[LoaderFacts], budget_bytes: float) -> float:
    """Return the share of the samples that fit, judged by the size of their batches.

    >>> facts = dict(address="a", is_training=True, dataset="D", batch_size=4, num_workers=0,
    ...     pin_memory=False, persistent_workers=False, prefetch_factor=None, batch_bytes=4000)
    >>> kept_share([LoaderFacts(**facts, dataset_len=100)], 50_000)
    0.5
    """
    needed = sum(
        (loader.dataset_len or 0) * loader.batch_bytes / max(1, loader.batch_size or 1)
        for loader in loaders
    )
    return min(1.0, budget_bytes / needed) if needed else 0.0


def check_dataset(dataset: Any) -> None:
    """Make sure that a data set is map-style and makes its samples when asked."""
    from torch import Tensor
    from torch.utils.data import IterableDataset, TensorDataset

    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise NotApplicable("the data set is iterable: its samples have no numbers to keep them by")
    if isinstance(dataset, TensorDataset | Tensor | list | tuple):
        raise NotApplicable("the samples lie in memory already")
    try:
        len(dataset)
    except TypeError:
        raise NotApplicable("the data set does not tell its length") from None


def check_workers(arguments: Mapping[str, Any]) -> None:
    """Make sure that the loader's workers can find what is kept."""
    if _spawns(arguments) and not can_be_sent():
        raise NotApplicable(NO_WAY)


def _cached(dataset: Any, found: Repeats, budget_bytes: int) -> Any:
    if not hasattr(dataset, "__dict__"):
        raise NotApplicable(f"a {type(dataset).__name__} cannot be stood in for")
    length = len(dataset)
    needed = int(1.1 * length * (found.sample_bytes + 128))
    if budget_bytes < LEAST_SHARE * needed:
        raise NotApplicable(
            f"{needed / 1e9:.1f} GB of samples, and {budget_bytes / 1e9:.1f} GB of memory for them"
        )
    store = ByteStore(slots=SLOTS_A_KEY * length, budget_bytes=min(needed, budget_bytes))
    return cached(dataset, store)


def _pixels_of(dataset: Any) -> int:
    """Return the bytes of pixels that Pillow decodes from files for one sample; 0 for none."""
    if "PIL.Image" not in sys.modules:
        return 0

    def work() -> int:
        store = ByteStore(slots=64, budget_bytes=256 * 1024**2)
        keep_decoded(store)
        wanted = sorted({0, len(dataset) // 2, len(dataset) - 1})
        for index in wanted:
            dataset[index]
        return store.used_bytes // len(wanted)

    try:
        return int(in_fork(work, 20.0))
    except ForkedError:
        return 0


def _spawns(arguments: Mapping[str, Any]) -> bool:
    if not arguments.get("num_workers"):
        return False
    return os.name != "posix" or start_method(arguments.get("multiprocessing_context")) != "fork"


KOREAN = """
Keep samples, or what was decoded for them, in memory.
    샘플이나 그 디코딩 결과를 메모리에 둡니다.
For a data set that gives the same sample each time:
    매번 같은 샘플을 주는 데이터셋이라면:
{kept} of {what} kept: {share} of {ms} ms of loading per step
    {what}의 {kept}를 보관해 스텝마다 {ms} ms인 데이터 로딩 중 {share}를 없앱니다
what is decoded for them, which is all that is the same each time,
    샘플에서 매번 같은 부분인 디코딩 결과
{why}, and spawned workers would not share the decoding
    {why}. spawn으로 시작한 워커들은 디코딩 결과를 나누어 쓰지 못합니다
{why}, and Pillow decodes no file for it
    {why}. Pillow가 디코딩하는 파일도 없습니다
{gb} GB of pixels do not fit into the memory
    픽셀 {gb} GB가 메모리에 들어가지 않습니다
{why}: nothing kept was used from then on
    {why}. 그때부터는 보관한 것을 쓰지 않았습니다
the data set is iterable: its samples have no numbers to keep them by
    이터러블 데이터셋이라 샘플을 보관할 때 쓸 번호가 없습니다
the samples lie in memory already
    샘플이 이미 메모리에 있습니다
the data set does not tell its length
    데이터셋이 길이를 알려 주지 않습니다
a {kind} cannot be stood in for
    {kind}을(를) 대신할 수 없습니다
{needed} GB of samples, and {room} GB of memory for them
    샘플이 {needed} GB인데 쓸 수 있는 메모리는 {room} GB입니다
"""
