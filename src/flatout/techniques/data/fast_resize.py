"""Resize Pillow's images with vector instructions, under the script's own calls.

What it does: `image.resize(...)`, and with it torchvision's `RandomResizedCrop`, stays as it is;
the bytes of colour images come from the same integer arithmetic as Pillow's, four channels of two
pixels at once.
When it helps: the step waits for data and images are resized with Pillow: a quarter of a classic
pipeline, and Pillow's loops take three times as long.
What it costs: a C compiler on the machine, as torch.compile needs for a CPU; a second, once.
How it is checked: bytes are identical: of random images when it is loaded, of the script's own
samples before the first batch, of the first images of each filter in every worker, then of one in
256.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.analysis.feeding import fed_change_ms, share_of
from flatout.data.images.substitution import Substitute, prepare, put_under, turn_swap
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.device_preprocess import waits_for_pillow

SAVED_PART = 0.6
"""Of the time in `resize`: 0.48 against 0.16 ms for a crop of 500x375 to 224x224, one core, less
what goes into Python around it (measured with Pillow 13, AVX2)."""
USUAL_SHARE = 0.18
"""Part of a loader's work that resizing takes where no one looked: 0.54 of 3.0 ms (measured)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FastResize(Technique):
    """Put a vectorised resampler under Pillow."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("resize",)
    by_hand: ClassVar[str] = """
Before the loader is iterated:
+ from flatout.techniques.data.fast_resize import resize_fast
+ loader = resize_fast(loader)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["FastResize"]:
        """Return the technique where a loop waits for what may be images, given a compiler."""
        return [cls()] if waits_for_pillow(profile) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take two thirds of the time in `resize` off what makes the samples."""
        share = share_of(profile, "resize", otherwise=USUAL_SHARE)
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=SAVED_PART * share),
            why=f"{share:.0%} of a sample's time goes into resizing, most of it for nothing",
        )

    def epoch(self, loader: Any) -> Any:
        """Prove once that the bytes are the same, and swap the resampler."""
        return resize_fast(loader)

    def turn_in_fetcher(self, fetcher: Any, is_on: bool) -> None:  # noqa: FBT001
        """Let Pillow's own calls do it, or not."""
        from flatout.data.images.pillow import ResizeSwap

        turn_swap(ResizeSwap, is_on=is_on)

    def way(self, loader: Any) -> Substitute:
        """Return what is proven, with the ways of other techniques."""
        return way_of()


def resize_fast(loader: Any) -> Any:
    """Let a `DataLoader`'s Pillow images be resized by vector instructions, to the same bytes.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Raises:
        NotApplicable: if there is no compiler, nothing is resized, or it gives other bytes.
    """
    return put_under(loader, way_of())


def way_of() -> Substitute:
    """Return resizing by vector instructions."""
    return Substitute(
        name="fast_resize", begin=swap, prepare=prepared, nothing="Pillow resizes no colour image"
    )


def prepared() -> None:
    """Compile and import here, not in each copy and worker; raises where that cannot be."""
    prepare("flatout.data.images.pillow")
    from flatout.kernels.resample import find_order

    find_order()


def swap() -> Any:
    """Swap the resampler of this process; return what becomes of it."""
    from flatout.data.images.pillow import swap_resize
    from flatout.kernels.resample import find_order, resampled

    return swap_resize(functools.partial(resampled, order=find_order()))


KOREAN = """
Put a vectorised resampler under Pillow.
    Pillow 아래에 벡터화된 리샘플러를 둡니다.
{share} of a sample's time goes into resizing, most of it for nothing
    샘플을 만드는 시간의 {share}가 크기 조정이며 그 대부분은 줄일 수 있습니다
Pillow resizes no colour image
    Pillow로 크기를 바꾸는 컬러 이미지가 없습니다
"""
