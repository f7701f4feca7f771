"""Put samples of similar length into one batch.

What it does: counts the tokens of every sample, then draws batches from windows of a random
permutation that are sorted by length; the order of the batches is random again.
When it helps: batches are padded to their longest sample and lengths differ much.
What it costs: batches are less of a random sample: long texts come together. Counting at the start.
How it is checked: as a training technique: every sample comes once an epoch; which samples share a
batch changes, so losses differ from step to step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.agent.worker_start import start_method
from flatout.data.caching import processes_here
from flatout.data.padding import SimilarLengths, lengths_of
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.dynamic_padding import COMPUTING, MIN_PAD_SHARE, pad_share

LEFT = 0.1
"""Share of the padding that is left in batches of similar lengths: assumed, the trial shows it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LengthBuckets(Technique):
    """Batches of samples of similar length."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward", "h2d"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    moves_random_stream: ClassVar[bool] = True
    by_hand: ClassVar[str] = """
Where the training loader is made; with Hugging Face's Trainer `group_by_length=True`:
- DataLoader(dataset, batch_size=32, shuffle=True)
+ from flatout.data.padding import SimilarLengths
+ DataLoader(dataset, batch_sampler=SimilarLengths(lengths, batch_size=32, window=$window))
"""

    window: int = 50
    """Batches among which samples are sorted; a larger window saves more and mixes less."""

    def __post_init__(self) -> None:
        if self.window < 2:
            raise ValueError(
                f"window={self.window} must be at least 2: one batch has no neighbours"
            )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["LengthBuckets"]:
        """Return the technique when batches of several shapes hold padding."""
        varies = any(model.input_shapes > 1 for model in profile.models)
        is_mapped = all(not loader.is_iterable for loader in profile.training_loaders)
        return [cls()] if varies and is_mapped and pad_share(profile) >= MIN_PAD_SHARE else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect computing to shrink with the tokens."""
        saved = pad_share(profile) * (1 - LEFT)
        spent_ms = sum(profile.phases_ms[name] for name in COMPUTING)
        return Effect(
            step_ms=-spent_ms * saved,
            why=f"{pad_share(profile):.0%} of the tokens are padding",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Draw the batches from windows sorted by length."""
        sampler = bucketed(arguments, window=self.window)
        given = {"batch_size": 1, "shuffle": False, "sampler": None, "drop_last": False}
        return {**arguments, **given, "batch_sampler": sampler}


def bucketed(arguments: Mapping[str, Any], *, window: int) -> SimilarLengths:
    """Return the sampler of batches for what a loader was asked.

    Raises:
        NotApplicable: if its order is not a plain shuffle, its samples tell no length, or it is one
            of several ranks that have no order in common.
    """
    from torch.utils.data import IterableDataset

    from flatout.data.sampler import plain_shuffle

    dataset, batch_sampler = arguments["dataset"], arguments.get("batch_sampler")
    if isinstance(dataset, IterableDataset | list) or not hasattr(dataset, "__len__"):
        raise NotApplicable("only a map-style data set can be drawn by length")
    if isinstance(batch_sampler, SimilarLengths):
        return batch_sampler
    asked = plain_shuffle(arguments)
    if start_method() != "fork":
        raise NotApplicable("lengths are counted in forked processes, and this system has none")
    return SimilarLengths(
        lengths_of(dataset, processes=processes_here()),
        batch_size=asked.batch_size,
        window=window,
        drop_last=asked.drop_last,
        generator=asked.generator,
    )


KOREAN = """
Batches of samples of similar length.
    길이가 비슷한 샘플끼리 배치로 묶습니다.
Where the training loader is made; with Hugging Face's Trainer `group_by_length=True`:
    학습 로더를 만드는 곳. Hugging Face의 Trainer라면 `group_by_length=True`:
only a map-style data set can be drawn by length
    맵 스타일 데이터셋만 길이에 따라 뽑을 수 있습니다
lengths are counted in forked processes, and this system has none
    길이는 fork한 프로세스에서 세는데, 이 시스템에서는 fork할 수 없습니다
window={n} must be at least 2: one batch has no neighbours
    window={n}: 2 이상이어야 합니다. 배치 하나로는 섞을 이웃이 없습니다
"""
