"""Decode only the part of a JPEG that a random crop keeps, under the script's own Pillow calls.

What it does: `Image.open(...)`, `convert("RGB")`, `crop(...)` and `resize(..., box=...)`, and with
them torchvision's `RandomResizedCrop`, stay as they are; rows and blocks outside the part are not
made into pixels.
When it helps: the step waits for data and the data set cuts parts out of JPEGs: a random crop of 8
to 100 % of the area keeps half of the picture.
What it costs: a C compiler on the machine, as torch.compile needs for a CPU; a second, once.
How it is checked: pixels are bit-identical: of the script's own samples before the first batch, of
the first images of each kind in every worker, then of one in 256. The library that decodes is the
one that Pillow decodes with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from flatout.analysis.feeding import fed_change_ms, share_of
from flatout.data.images.substitution import Substitute, prepare, put_under, turn_swap
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.device_preprocess import waits_for_pillow
from flatout.techniques.data.fast_decode import USUAL_SHARE

SAVED_PART = 0.24
"""Of the time in decoding, for random crops of 8 to 100 % of the area: 0.59 against 0.78 ms for a
photograph of 500x375 (measured with Pillow 13). Reading the code of what is above the part is
not saved."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDecode(Technique):
    """Put decoding of parts under Pillow."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("decode",)
    by_hand: ClassVar[str] = """
Before the loader is iterated:
+ from flatout.techniques.data.region_decode import decode_regions
+ loader = decode_regions(loader)
"""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["RegionDecode"]:
        """Return the technique where a loop waits for what may be images, given a compiler."""
        return [cls()] if waits_for_pillow(profile) else ()

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take a quarter of the time in decoding off what makes the samples."""
        share = share_of(profile, "decode", otherwise=USUAL_SHARE)
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=SAVED_PART * share),
            why=f"{share:.0%} of a sample's time goes into decoding, also what a crop throws away",
        )

    def epoch(self, loader: Any) -> Any:
        """Prove once that the pixels are the same, and swap the decoding."""
        return decode_regions(loader)

    def turn_in_fetcher(self, fetcher: Any, is_on: bool) -> None:  # noqa: FBT001
        """Let Pillow's own calls do it, or not."""
        from flatout.data.images.lazy_jpegs import RegionSwap

        turn_swap(RegionSwap, is_on=is_on)

    def way(self, loader: Any) -> Substitute:
        """Return what is proven, with the ways of other techniques."""
        return way_of()


def decode_regions(loader: Any) -> Any:
    """Let only those parts of a `DataLoader`'s JPEGs be decoded that are cut out of them.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Raises:
        NotApplicable: if there is no compiler, Pillow's library cannot do it, nothing is cut out of
            JPEGs, or it gives other pixels.
    """
    return put_under(loader, way_of())


def way_of() -> Substitute:
    """Return decoding of parts."""
    return Substitute(
        name="region_decode", begin=swap, prepare=prepared, nothing="no part is cut out of a JPEG"
    )


def prepared() -> None:
    """Compile and import here, not in each copy and worker; raises where that cannot be."""
    prepare("flatout.data.images.lazy_jpegs")
    from flatout.kernels.region import open_library

    open_library()


def swap() -> Any:
    """Swap the decoding of this process; return what becomes of it."""
    from flatout.data.images.lazy_jpegs import swap_regions
    from flatout.kernels.region import decode_region, open_library

    open_library()
    return swap_regions(decode_region)


KOREAN = """
Put decoding of parts under Pillow.
    Pillow 아래에서 필요한 부분만 디코딩합니다.
{share} of a sample's time goes into decoding, also what a crop throws away
    샘플을 만드는 시간의 {share}가 디코딩이며, 크롭에서 버리는 부분까지 디코딩합니다
no part is cut out of a JPEG
    JPEG에서 잘라 내는 부분이 없습니다
"""
