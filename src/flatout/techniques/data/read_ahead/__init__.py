"""Ask for what the coming batches will read before a worker reads it.

What it does: finds out which file is behind each sample by watching what a few samples open, or
which record of a packed store, then tells the kernel to read those of the next batches, in the
order of the loader's sampler. Asked to, it has all files read as soon as the loader is made, if
they fit into the free memory.
When it helps: files are not cached and workers are blocked in reading them: cold or slow storage.
What it costs: a thread that opens each file once more; page cache for what is ahead.
How it is checked: batches and random streams are bit-identical; the sampler is run ahead only
through numbers that are settled when an epoch starts, so none of its draws comes earlier.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, final

from flatout.analysis.feeding import MIN_WAIT_SHARE
from flatout.data.packed_store import CAN_ADVISE, Ahead, Ask, asking_files, looking_ahead
from flatout.data.proof.dataset_facts import DatasetFacts
from flatout.data.proof.sampler_draws import (
    check_sampler,
    sampler_of,
    settled_batches,
    settled_numbers,
)
from flatout.records.errors import NotApplicable
from flatout.records.journey import WORKERS
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state
from flatout.techniques.data.read_ahead.dataset_files import FindFile, WarmUp, find_files

MIN_READ_SHARE = 0.10
"""Less of the making of a batch than a tenth blocked in reading, and there is little to save."""
MIN_STORED_SHARE = 0.05
"""Least share of the bytes read that came from storage: less means that the files are cached."""

LOCAL_RANK = "LOCAL_RANK"
"""Which of the ranks on this host this one is, set by launchers: one of them warms the files up."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAhead(Technique):
    """Read what the coming batches need into the page cache."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "blocked_reads"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("read",)
    by_hand: ClassVar[str] = """
In a thread alongside the training, for the files of the batches to come, 128 KiB at a time:
+ os.posix_fadvise(descriptor, begin, 128 << 10, os.POSIX_FADV_WILLNEED)
"""

    batches_ahead: int = 16
    """How many batches ahead of the workers files or records are asked for."""

    warms_up: bool = False
    """Whether all files, or the shards of a packed store, are asked for when the loader is made."""
    asks: DatasetFacts[Ask] = process_state(DatasetFacts)
    """What asks for the files, or the records, of a batch's samples."""
    warm_ups: DatasetFacts[WarmUp] = process_state(DatasetFacts)
    """What brings the files of each data set into the page cache."""
    warmed: list[WarmUp] = process_state(list)

    def __post_init__(self) -> None:
        if self.batches_ahead < 1:
            raise ValueError(f"batches_ahead={self.batches_ahead} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ReadAhead"]:
        """Return the technique when cold reads are what the workers were measured to wait for.

        Without the warm-up: what it leaves in the page cache would be there for the baseline's next
        trial as well.
        """
        is_waiting = profile.share("data_wait") >= MIN_WAIT_SHARE and profile.training_loaders
        if not is_waiting or any(loader.is_iterable for loader in profile.training_loaders):
            return ()
        return [cls()] if blocked_share(profile) >= MIN_READ_SHARE and is_cold(profile) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the share of the waiting that the workers spent blocked in reading to go."""
        share = blocked_share(profile)
        return Effect(
            step_ms=-profile.phases_ms["data_wait"] * share,
            why=f"{share:.0%} of making a batch is waiting for files that are not cached",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Check that the sampler may be drawn from early and that the files can be known."""
        check_loader(arguments)
        dataset = arguments["dataset"]
        if not self._only_warms(dataset):
            self.asks.find(dataset, lambda: asking(dataset))
        if self.warms_up and os.environ.get(LOCAL_RANK, "0") == "0":
            self.warm_ups.find(dataset, lambda: self._begun(dataset))
        return arguments

    def batches(self, batches: Iterator[Any], loader: Any) -> Iterator[Any]:
        """Let the iterator's sampler run ahead of its workers."""
        check_loader(vars(loader))
        if self._only_warms(loader.dataset):
            return batches
        sampler = getattr(batches, "_sampler_iter", None)
        if sampler is None:
            raise NotApplicable("the loader has a way of its own to draw numbers")
        ahead = Ahead(self.asks.find(loader.dataset, lambda: asking(loader.dataset)))
        settled = islice(sampler, settled_batches(loader, getattr(batches, "_send_idx", 0)))
        batches._sampler_iter = chain(  # type: ignore[attr-defined]
            looking_ahead(settled, ahead.want, self.batches_ahead, ahead.close), sampler
        )
        return batches

    def end(self) -> str:
        """Say why the files were not asked for beforehand, if they were to be."""
        return next((found.trouble for found in self.warmed if found.trouble), "")

    def _begun(self, dataset: Any) -> WarmUp:
        self.warmed.append(warm_up(dataset))
        return self.warmed[-1]

    def _only_warms(self, dataset: Any) -> bool:
        """Return whether there is nothing to look ahead for: the shards are all brought in."""
        from flatout.data.dataset_matching import find_store

        return self.warms_up and find_store(dataset) is not None


FILES: DatasetFacts[FindFile] = DatasetFacts()
"""What tells the file of a sample."""


def asking(dataset: Any) -> Ask:
    """Return what asks for the files of a data set's samples, or for their records in a store."""
    from flatout.data.dataset_matching import find_store, store_behind

    if find_store(dataset) is not None:
        return store_behind(dataset).will_need
    return asking_files(FILES.find(dataset, lambda: files_of(dataset)))


def files_of(dataset: Any) -> FindFile:
    """Return what tells the file of a sample."""
    found = find_files(dataset)
    if found is None:
        raise NotApplicable("no list of the data set names the files that its samples open")
    return found


def warm_up(dataset: Any) -> WarmUp:
    """Bring all files of a data set, or the shards of its packed store, into the page cache.

    That happens in a thread of this process, and only if they fit into half of the free memory.

    Raises:
        NotApplicable: if the files are not known, or the system takes no such advice.
    """
    from flatout.data.dataset_matching import find_store

    if not CAN_ADVISE:
        raise NotApplicable("this system has no posix_fadvise")
    store = find_store(dataset)
    if store is not None:
        shards = [store.folder / shard.name for shard in store.header.shards]
        return WarmUp(lambda: shards)
    path_of = FILES.find(dataset, lambda: files_of(dataset))
    found = (path_of(number) for number in range(len(dataset)))
    return WarmUp(lambda: (Path(path) for path in found if path))


def read_ahead(loader: Any, *, batches_ahead: int = 16) -> Iterator[Any]:
    """Return the batches of one epoch of a loader, what the next ones need being read.

    Raises:
        NotApplicable: if neither files nor records are known, or the sampler must not be drawn
            from early.
    """
    return ReadAhead(batches_ahead=batches_ahead).batches(iter(loader), loader)


def check_loader(arguments: Mapping[str, Any]) -> None:
    """Make sure that numbers may be drawn early and files be asked for."""
    from torch.utils.data import IterableDataset

    if not CAN_ADVISE:
        raise NotApplicable("this system has no posix_fadvise")
    if isinstance(arguments["dataset"], IterableDataset):
        raise NotApplicable("the data set is iterable: what comes next is not known")
    check_sampler(arguments)
    sampler = sampler_of(arguments)
    if getattr(sampler, "replacement", False) and settled_numbers(sampler) is not None:
        raise NotApplicable(
            "with replacement, RandomSampler draws from the generator given as it goes"
        )


def blocked_share(profile: Profile) -> float:
    """Return the share of making batches that was spent blocked in reading."""
    legs = profile.journey.legs if profile.journey else ()
    wanted = [leg for leg in legs if leg.where == WORKERS] or list(legs)
    made_ms = sum(leg.ms for leg in wanted if leg.name in ("read", "decode", "collate"))
    read_ms = sum(leg.ms for leg in wanted if leg.name == "read")
    return read_ms / made_ms if made_ms else 0.0


def is_cold(profile: Profile) -> bool:
    """Return whether storage had to deliver a visible part of what was read."""
    facts = profile.journey.workers if profile.journey else ()
    read = sum(worker.read_bytes_per_step or 0.0 for worker in facts)
    stored = sum(worker.storage_bytes_per_step or 0.0 for worker in facts)
    return stored > 0 and stored >= MIN_STORED_SHARE * read


KOREAN = """
Read what the coming batches need into the page cache.
    다가올 배치에 필요한 것을 페이지 캐시로 미리 읽습니다.
In a thread alongside the training, for the files of the batches to come, 128 KiB at a time:
    학습과 함께 도는 스레드에서, 다가올 배치의 파일을 한 번에 128 KiB씩:
the loader has a way of its own to draw numbers
    로더가 자체 방식으로 번호를 뽑습니다
no list of the data set names the files that its samples open
    데이터셋에 샘플이 여는 파일의 목록이 없습니다
this system has no posix_fadvise
    이 시스템에는 posix_fadvise가 없습니다
the data set is iterable: what comes next is not known
    이터러블 데이터셋이라 다음에 무엇이 올지 알 수 없습니다
with replacement, RandomSampler draws from the generator given as it goes
    복원 추출을 하는 RandomSampler는 주어진 생성기에서 그때그때 뽑습니다
"""
