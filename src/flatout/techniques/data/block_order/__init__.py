"""Read the samples in blocks that lie together on storage, mixed as well as by a shuffle.

What it does: draws each sample once an epoch in an order of blocks: neighbours on storage, files or
records of a packed store, are read together, a window of thousands at a time in a thread, and the
samples of a window are shuffled. How well classes mix is counted before anything is changed.
When it helps: files are not cached and random reads cost seeks: a spinning disk, a packed store on
a network share.
What it costs: page cache for two windows; the first window is read before the first batch comes.
How it is checked: as a training technique: every sample comes once an epoch, and classes fall into
batches as evenly as by a shuffle, both counted; which samples share a batch changes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, final

from flatout.data.proof.dataset_facts import DatasetFacts
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique, process_state
from flatout.techniques.data.read_ahead import ReadAhead, blocked_share

if TYPE_CHECKING:
    from flatout.techniques.data.block_order.layout import Arrangement

SAVED = 0.8
"""Of the time that is blocked in reading: on a throttled disk a packed store in block order came
5.13 times as fast as in single random reads (benchmarks/records/2026-11-23_slow_storage...)."""
SIZES = (2, 4, 8, 16)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOrder(Technique):
    """Read the samples in blocks that lie together, mixed as well as by a shuffle."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait", "blocked_reads"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    by_hand: ClassVar[str] = """
Where the training loader is made:
- DataLoader(dataset, batch_size=64, shuffle=True)
+ from flatout.techniques.data.block_order.layout import block_shuffle
+ DataLoader(dataset, batch_size=64, sampler=block_shuffle(dataset, 64, block=$block))
"""

    block: int = 16
    """Most samples that are read together; fewer where these would not mix as well as a shuffle."""
    arranged: "DatasetFacts[Arrangement]" = process_state(DatasetFacts)
    """Of each data set; a script may build its loader again in each epoch."""
    used: "list[Arrangement]" = process_state(list)
    """The last one that a loader was given, which the report is about."""

    def __post_init__(self) -> None:
        if self.block not in SIZES:
            raise ValueError(f"block={self.block} must be one of {', '.join(map(str, SIZES))}")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["BlockOrder"]:
        """Return the technique where cold reads are what the workers were measured to wait for."""
        return [cls()] if ReadAhead.candidates(profile, machine) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect most of the waiting that the workers spent blocked in reading to go."""
        share = blocked_share(profile)
        return Effect(
            step_ms=-profile.phases_ms["data_wait"] * share * SAVED,
            why=f"{share:.0%} of making a batch is waiting for files that are not cached",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draw the samples in block order instead of in a shuffle."""
        from torch.utils.data import BatchSampler, IterableDataset

        from flatout.data.proof.sampler_draws import sampler_of
        from flatout.data.sampler import plain_shuffle
        from flatout.techniques.data.block_order.layout import BlockShuffle

        if isinstance(sampler_of(arguments), BlockShuffle):
            return arguments  # a framework rebuilt a loader that already has the technique
        if isinstance(arguments["dataset"], IterableDataset):
            raise NotApplicable("the data set is iterable: what comes next is not known")
        asked = plain_shuffle(arguments)
        found = self._arranged(arguments["dataset"], asked.batch_size)
        sampler = BlockShuffle(found, asked.generator)
        if arguments.get("batch_sampler") is None:
            return {**arguments, "shuffle": False, "sampler": sampler}
        batches = BatchSampler(sampler, asked.batch_size, asked.drop_last)
        return {**arguments, "batch_sampler": batches}

    def epoch(self, loader: Any) -> Any:
        """Follow a packed store that another technique put under the loader since."""
        from flatout.data.dataset_matching import is_packed
        from flatout.data.proof.sampler_draws import sampler_of
        from flatout.techniques.data.block_order.layout import BlockShuffle

        sampler = sampler_of(vars(loader))
        if isinstance(sampler, BlockShuffle) and is_packed(loader.dataset):
            try:
                batch_size = loader.batch_sampler.batch_size
                sampler.arrangement = self._arranged(loader.dataset, batch_size)
            except NotApplicable:
                # The order is under way, as good as any; its files are no longer what is read.
                sampler.arrangement = sampler.arrangement.unread()
        return loader

    def end(self) -> str:
        """Say what was counted of the order: that is what it promises."""
        if not self.used:
            return ""
        found = self.used[-1]
        samples, once, jumps = len(found.layout.numbers), found.once(), found.jumps()
        if found.uneven is None:
            return (
                f"an epoch has {once} of {samples} samples once, with {jumps} jumps on storage in "
                f"blocks of {found.block} and windows of {found.window}, from a store that was "
                "shuffled when it was packed"
            )
        return (
            f"an epoch has {once} of {samples} samples once, with {jumps} jumps on storage in "
            f"blocks of {found.block} and windows of {found.window}, and classes fall into batches "
            f"{found.uneven:.2f} times as unevenly as by a full shuffle"
        )

    def _arranged(self, dataset: Any, batch_size: int) -> "Arrangement":
        from flatout.techniques.data.block_order.layout import arrange

        found = self.arranged.find(dataset, lambda: arrange(dataset, batch_size, block=self.block))
        self.used[:] = [found]
        return found


KOREAN = """
Read the samples in blocks that lie together, mixed as well as by a shuffle.
    저장 장치에 함께 있는 샘플을 블록으로 읽고 셔플만큼 고르게 섞습니다.
Where the training loader is made:
    학습 로더를 만드는 곳:
block={n} must be one of {sizes}
    block={n}: {sizes} 중 하나여야 합니다
an epoch has {n} of {samples} samples once, with {jumps} jumps on storage in blocks of {block} and
windows of {window}, from a store that was shuffled when it was packed
    에폭 하나에 샘플 {samples}개 중 {n}개가 한 번씩 나오고, {block}개씩의 블록과 {window}개짜리
    윈도로 저장 장치에서 {jumps}번 건너뛰며, 저장소는 패킹할 때 섞였습니다
an epoch has {n} of {samples} samples once, with {jumps} jumps on storage in blocks of {block} and
windows of {window}, and classes fall into batches {ratio} times as unevenly as by a full shuffle
    에폭 하나에 샘플 {samples}개 중 {n}개가 한 번씩 나오고, {block}개씩의 블록과 {window}개짜리
    윈도로 저장 장치에서 {jumps}번 건너뛰며, 클래스는 전체 셔플의 {ratio}배로 고르지 않게 배치에
    들어갑니다
"""
