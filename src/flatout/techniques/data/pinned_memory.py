"""Put batches into page-locked memory, from which the device copies faster.

What it does: sets `pin_memory=True` on the training loaders.
When it helps: copies from host to device take a visible part of the step on a CUDA device.
What it costs: page-locked host memory for the batches in flight, and a copy in a thread.
How it is checked: the batches are bit-identical.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.records.errors import NotApplicable
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, SourceForm, Technique, prior_for

MIN_COPY_SHARE = 0.02
"""Below this share of copies, free copies could not give the 1.02x that keeps a technique."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PinnedMemory(Technique):
    """Load batches into page-locked memory."""

    addresses: ClassVar[frozenset[str]] = frozenset({"h2d"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("copy",)
    by_hand: ClassVar[str] = """
Where the training loader is made, and where its batches go to the device:
+ DataLoader(..., pin_memory=True)
+ batch = batch.to(device, non_blocking=True)
"""
    source: ClassVar[SourceForm | None] = SourceForm(
        loader={"pin_memory": "True"}, copy="non_blocking=True"
    )

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["PinnedMemory"]:
        """Return the technique when a CUDA device waits for copies from pageable memory."""
        if profile.device_kind != "cuda" or profile.share("h2d") < MIN_COPY_SHARE:
            return ()
        return [cls()] if any(not x.pin_memory for x in profile.training_loaders) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Expect the copies to take less time, by its prior."""
        copies_ms = profile.phases_ms["h2d"]
        return Effect(
            step_ms=-copies_ms * (1 - 1 / prior_for(self, profile).speedup),
            why=f"{copies_ms:.1f} ms of copies per step from pageable memory",
        )

    def loader(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask for page-locked batches."""
        if arguments.get("pin_memory"):
            raise NotApplicable("the script asked for pinned memory itself")
        return pinned(arguments)


def pinned(arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a loader's arguments with `pin_memory` set.

    Raises:
        NotApplicable: if there is no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise NotApplicable("page-locked memory speeds up copies to a CUDA device; there is none")
    return {**arguments, "pin_memory": True}


KOREAN = """
Load batches into page-locked memory.
    배치를 고정된(page-locked) 메모리로 읽습니다.
Where the training loader is made, and where its batches go to the device:
    학습 로더를 만드는 곳과 배치를 디바이스로 보내는 곳:
{ms} ms of copies per step from pageable memory
    스텝마다 {ms} ms를 고정되지 않은 메모리에서 복사하는 데 씁니다
the script asked for pinned memory itself
    스크립트가 pin_memory를 직접 요청했습니다
page-locked memory speeds up copies to a CUDA device; there is none
    고정된 메모리는 CUDA 디바이스로의 복사를 빠르게 하는데, 여기에는 CUDA 디바이스가 없습니다
"""
