"""Decode JPEGs with a faster library under the script's own Pillow calls.

What it does: `Image.open(...)` and all that follows stay as they are; the pixels of plain colour
JPEGs come from libjpeg-turbo by way of simplejpeg, or from OpenCV.
When it helps: the step waits for data and the data set opens JPEGs with Pillow: decoding is two
fifths of a classic pipeline, and Pillow's takes 1.4 times as long.
What it costs: one more package (`pip install 'flatout[jpeg]'`); the first images of each kind are
decoded both ways.
How it is checked: pixels are bit-identical, on the script's own files before the first batch, on
the first images of each kind in every worker, and on one in 256 after that.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

from flatout.analysis.feeding import fed_change_ms, share_of
from flatout.data.images.substitution import Substitute, prepare, put_under, turn_swap
from flatout.records.machine import Machine
from flatout.records.profile import Profile
from flatout.records.technique import Effect, Numerics, Technique
from flatout.techniques.data.device_preprocess import waits_for_pictures

if TYPE_CHECKING:
    from flatout.data.images.decoders import Name

NO_GAIN = 0.99
"""A decoder that is no faster is predicted to bring nothing that a trial could show."""
NOTHING = "no colour JPEG is opened with Pillow"
NOTHING_WHOLE = "no colour JPEG that ends with its end marker is opened with Pillow"
USUAL_SHARE = 0.3
"""Part of a loader's work that decoding takes where no one looked: 0.87 of 3.0 ms (measured)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FastDecode(Technique):
    """Put a faster JPEG decoder under Pillow."""

    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
    stages: ClassVar[tuple[str, ...]] = ("decode",)
    extra: ClassVar[str] = "jpeg"
    by_hand: ClassVar[str] = """
In the data set, for colour JPEGs:
- image = Image.open(path).convert("RGB")
+ image = Image.fromarray(simplejpeg.decode_jpeg(open(path, "rb").read()))
"""

    decoder: Literal["simplejpeg", "opencv"] = "simplejpeg"
    """The library that decodes."""

    @classmethod
    def candidates(cls, profile: Profile, machine: Machine) -> Sequence["FastDecode"]:
        """Return the fastest decoder there is, where a loop waits for what may be images."""
        if not waits_for_pictures(profile):
            return ()
        from flatout.data.images.decoders import installed

        found = installed()
        return [cls(decoder=found[0])] if found else [cls()]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take off decoding what the other library saves, as both decode a picture here and now."""
        from flatout.data.images.decoders import decoding_ratio

        ratio = min(decoding_ratio(self.decoder), NO_GAIN)
        share = share_of(profile, "decode", otherwise=USUAL_SHARE)
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=share * (1 - ratio)),
            why=f"{self.decoder} takes {ratio:.2f} of Pillow's time, for {share:.0%} of loading",
        )

    def epoch(self, loader: Any) -> Any:
        """Prove once that the pixels are the same, and swap the decoder."""
        return decode_fast(loader, self.decoder)

    def turn_in_fetcher(self, fetcher: Any, is_on: bool) -> None:  # noqa: FBT001
        """Let Pillow's own calls do it, or not."""
        from flatout.data.images.pillow import DecoderSwap

        turn_swap(DecoderSwap, is_on=is_on)

    def way(self, loader: Any) -> Substitute:
        """Return what is proven, with the ways of other techniques."""
        return way_of(self.decoder)


def decode_fast(loader: Any, decoder: "Name" = "simplejpeg") -> Any:
    """Let a `DataLoader`'s Pillow images be decoded by another library, bit for bit the same.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Raises:
        NotApplicable: if the library is missing, no JPEG is opened, or it gives other pixels.
    """
    return put_under(loader, way_of(decoder))


def way_of(decoder: "Name") -> Substitute:
    """Return decoding by a library; raises NotApplicable where it is missing."""
    from flatout.data.images.decoders import load_decoder

    load_decoder(decoder)
    return Substitute(
        name="fast_decode",
        begin=functools.partial(swap, decoder),
        prepare=functools.partial(prepare, "flatout.data.images.pillow"),
        nothing=NOTHING if decoder == "simplejpeg" else NOTHING_WHOLE,
    )


def swap(decoder: "Name") -> Any:
    """Swap the decoder of this process; return what becomes of it."""
    from flatout.data.images.decoders import load_decoder
    from flatout.data.images.pillow import swap_decoder

    return swap_decoder(load_decoder(decoder))


KOREAN = """
Put a faster JPEG decoder under Pillow.
    Pillow 아래에 더 빠른 JPEG 디코더를 둡니다.
In the data set, for colour JPEGs:
    데이터셋에서, 컬러 JPEG의 경우:
no colour JPEG is opened with Pillow
    Pillow로 여는 컬러 JPEG이 없습니다
no colour JPEG that ends with its end marker is opened with Pillow
    끝 표시까지 온전한 컬러 JPEG을 Pillow로 열지 않습니다
{decoder} takes {ratio} of Pillow's time, for {share} of loading
    데이터 로딩의 {share}인 디코딩을 {decoder}이(가) Pillow의 {ratio}배 시간에 합니다
"""
