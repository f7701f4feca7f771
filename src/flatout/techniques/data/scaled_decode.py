"""Decode large JPEGs at a half, a quarter or an eighth where the script makes them small anyway.

What it does: `Image.open(...)`, `convert("RGB")`, `crop(...)` and `resize(...)` stay as they are;
of a photograph much larger than what becomes of it only the low frequencies are decoded.
When it helps: the step waits for data and photographs of many megapixels are made small: decoding
is then most of a sample.
What it costs: pixels are not those of the script, though close: the result is resized from a
picture that is still `gap` times as large. A C compiler, a second, once.
How it is checked: the script's own first samples have the same labels and pictures that are alike;
it is tried under `--numerics training` only.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.analysis.feeding import fed_change_ms, share_of
from flatout.data.images.substitution import Substitute, put_under
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.device_preprocess import waits_for_pillow
from flatout.techniques.data.fast_decode import USUAL_SHARE
from flatout.techniques.data.region_decode import prepared

SAVED_PART = 0.5
"""Of the time in decoding, where photographs are large enough; how large they are is not known
before the samples are looked at."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledDecode(Technique):
    """Put decoding at a fraction under Pillow."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.TRAINING
    stages: ClassVar[tuple[str, ...]] = ("decode",)
    by_hand: ClassVar[str] = """
In the data set, before the photograph is converted, cropped or resized:
  image = Image.open(path)
+ image.draft("RGB", (2 * size, 2 * size))
"""

    gap: float = 2.0
    """Times that what is decoded stays larger than what comes out, in width and height. Pillow's
    `reducing_gap` means the same, and calls 2 close to the fair resampling."""

    def __post_init__(self) -> None:
        if not 1.0 <= self.gap <= 8.0:
            raise ValueError(f"gap={self.gap} must be between 1 and 8")

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["ScaledDecode"]:
        """Return the technique where a loop waits for what may be images, given a compiler."""
        return [cls()] if waits_for_pillow(profile) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take half of the time in decoding off what makes the samples."""
        share = share_of(profile, "decode", otherwise=USUAL_SHARE)
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=SAVED_PART * share),
            why=f"{share:.0%} of a sample's time is decoding: half of that, if pictures are large",
        )

    def epoch(self, loader: Any) -> Any:
        """Look once whether the pictures are alike, and swap the decoding."""
        return decode_scaled(loader, self.gap)


def decode_scaled(loader: Any, gap: float = 2.0) -> Any:
    """Let a `DataLoader`'s large JPEGs be decoded at a fraction of their size. Lossy.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Args:
        loader: A `torch.utils.data.DataLoader` over a map-style data set.
        gap: Times that what is decoded stays larger than what comes out.

    Raises:
        NotApplicable: if there is no compiler, Pillow's library cannot do it, no photograph is so
            large, or the pictures are not alike.
    """
    way = Substitute(
        name="scaled_decode",
        begin=functools.partial(swap, gap),
        prepare=prepared,
        nothing="no JPEG is so much larger than what it is resized to",
        is_lossy=True,
    )
    return put_under(loader, way)


def swap(gap: float) -> Any:
    """Swap the decoding of this process; return what becomes of it."""
    from flatout.data.images.lazy_jpegs import swap_shrinking
    from flatout.kernels.region import decode_region, open_library

    open_library()
    return swap_shrinking(decode_region, gap)


KOREAN = """
Put decoding at a fraction under Pillow.
    Pillow 아래에서 몇 분의 1 크기로 디코딩합니다.
In the data set, before the photograph is converted, cropped or resized:
    데이터셋에서 사진을 변환하거나, 자르거나, 크기를 바꾸기 전에:
{share} of a sample's time is decoding: half of that, if pictures are large
    샘플을 만드는 시간의 {share}가 디코딩입니다. 그림이 크면 그 절반으로 줄어듭니다
no JPEG is so much larger than what it is resized to
    줄인 뒤의 크기보다 그만큼 큰 JPEG이 없습니다
"""
