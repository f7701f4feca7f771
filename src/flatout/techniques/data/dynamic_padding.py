"""Cut the padding that every sample of a batch has.

What it does: wraps the loader's collate function and takes away the columns, at either end, in
which the attention mask keeps no token of any sample.
When it helps: samples are padded to a fixed length and most are shorter.
What it costs: batches of many shapes; compiled models compile again for some of them.
How it is checked: as a training technique: a model that heeds its mask computes the same up to
rounding, one that counts padding (a mean over all positions) does not.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.data.padding import trimmed
from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique

MIN_PAD_SHARE = 0.05
"""Less padding than this is not worth batches of many shapes."""
KEPT = 0.5
"""Share of the padding that stays, because the longest sample of a batch sets its length: assumed,
the trial shows it."""
COMPUTING = ("forward", "backward")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicPadding(Technique):
    """Pad to the longest sample of a batch instead of to a fixed length."""

    addresses: ClassVar[frozenset[str]] = frozenset({"forward", "backward", "h2d"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    by_hand: ClassVar[str] = """
With Hugging Face, where samples are tokenised and collated:
- tokenizer(text, padding="max_length")
+ tokenizer(text)
+ DataLoader(..., collate_fn=DataCollatorWithPadding(tokenizer, pad_to_multiple_of=$multiple_of))
"""

    multiple_of: int = 8
    """Lengths are rounded up to a multiple: fewer shapes, and sizes that matrix units like."""

    def __post_init__(self) -> None:
        if self.multiple_of < 1:
            raise ValueError(f"multiple_of={self.multiple_of} must be at least 1")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["DynamicPadding"]:
        """Return the technique when batches of one shape hold padding."""
        fixed = all(model.input_shapes <= 1 for model in profile.models)
        return [cls()] if fixed and pad_share(profile) >= MIN_PAD_SHARE else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect computing to shrink with the tokens."""
        saved = pad_share(profile) * (1 - KEPT)
        spent_ms = sum(profile.phases_ms[name] for name in COMPUTING)
        return Effect(
            step_ms=-spent_ms * saved,
            peak_bytes=-int(profile.peak_bytes.allocated * saved / 2),
            why=f"{pad_share(profile):.0%} of the tokens are padding",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Cut the padding where batches are put together."""
        from torch.utils.data import default_collate

        collate = arguments.get("collate_fn")
        if isinstance(collate, Trimmed):
            return arguments
        if arguments.get("batch_size") is None and arguments.get("batch_sampler") is None:
            raise NotApplicable("the loader does not make batches")
        if not _has_mask(arguments["dataset"], collate or default_collate):
            raise NotApplicable("no attention_mask tells which tokens of a batch are padding")
        wanted = Trimmed(collate or default_collate, self.multiple_of)
        return {**arguments, "collate_fn": wanted}


@dataclass(frozen=True, slots=True)
class Trimmed:
    """A collate function whose batches lose the padding that all samples share."""

    collate: Callable[[Any], Any]
    multiple_of: int = 8

    def __call__(self, samples: Any) -> Any:
        """Put a batch together."""
        return trimmed(self.collate(samples), multiple_of=self.multiple_of)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("collate", "multiple_of"):
            raise AttributeError(name)
        return getattr(self.collate, name)


def pad_share(profile: Profile) -> float:
    """Return the share of padding in the training's batches, 0 where nothing tells."""
    return max((loader.pad_share or 0.0 for loader in profile.training_loaders), default=0.0)


def _has_mask(dataset: Any, collate: Callable[[Any], Any]) -> bool:
    """Return whether a batch of two samples has a mask; asked in a forked process."""
    from flatout.agent.hooks.loader import padding_of
    from flatout.data.proof.forked import ForkedError, in_fork

    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) < 2:
        return False
    try:
        return bool(in_fork(lambda: padding_of(collate([dataset[0], dataset[1]])) is not None, 30))
    except ForkedError:
        return False


KOREAN = """
Pad to the longest sample of a batch instead of to a fixed length.
    고정된 길이 대신 배치에서 가장 긴 샘플에 맞춰 패딩합니다.
With Hugging Face, where samples are tokenised and collated:
    Hugging Face에서 샘플을 토큰화하고 묶는 곳:
no attention_mask tells which tokens of a batch are padding
    배치의 어느 토큰이 패딩인지 알려 주는 attention_mask가 없습니다
"""
