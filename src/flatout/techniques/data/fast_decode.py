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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, final

from flatout.core.errors import NotApplicable
from flatout.core.machine import Machine
from flatout.core.profile import Profile
from flatout.core.technique import Effect, Numerics, Technique
from flatout.profiling.feeding import fed_change_ms, share_of
from flatout.techniques.data.device_preprocess import MIN_SAMPLE_BYTES
from flatout.techniques.data.loader_workers import MIN_WAIT_SHARE

REFUSED = "_flatout_not_swapped"
"""On a loader: why Pillow goes on decoding."""
SWAPPED = "_flatout_swapped"
NO_GAIN = 0.99
"""A decoder that is no faster is predicted to bring nothing that a trial could show."""
USUAL_SHARE = 0.3
"""Part of a loader's work that decoding takes where nobody looked: 0.87 of 3.0 ms (measured)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FastDecode(Technique):
    """Put a faster JPEG decoder under Pillow."""

    family: ClassVar[str] = "data"
    addresses: ClassVar[frozenset[str]] = frozenset({"data_wait"})
    numerics: ClassVar[Numerics] = Numerics.EXACT
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
        del machine
        loaders = [x for x in profile.training_loaders if not x.is_iterable]
        is_waiting = profile.share("data_wait") >= MIN_WAIT_SHARE
        # Bytes, not floats: the batches may travel as bytes by now.
        least = MIN_SAMPLE_BYTES / 4
        if not is_waiting or not any(
            x.batch_bytes >= least * max(1, x.batch_size or 1) for x in loaders
        ):
            return ()
        from flatout.data.decoders import installed

        found = installed()
        return [cls(decoder="opencv")] if found == ("opencv",) else [cls()]

    def predict(self, profile: Profile, machine: Machine) -> Effect:
        """Take off decoding what the other library saves, as both decode a picture here and now."""
        from flatout.data.decoders import decoding_ratio

        ratio = min(decoding_ratio(self.decoder), NO_GAIN)
        share = share_of(profile, "decode", otherwise=USUAL_SHARE)
        return Effect(
            step_ms=fed_change_ms(profile, machine, saved_share=share * (1 - ratio)),
            why=f"{self.decoder} takes {ratio:.2f} of Pillow's time, for {share:.0%} of loading",
        )

    def epoch(self, loader: Any) -> Any:
        """Prove once that the pixels are the same, and swap the decoder."""
        return decode_fast(loader, self.decoder)


def decode_fast(loader: Any, decoder: str = "simplejpeg") -> Any:
    """Let a `DataLoader`'s Pillow images be decoded by another library, bit for bit the same.

    The first samples are made both ways in forked copies of the process and compared. Call it
    before the loader is first iterated.

    Raises:
        NotApplicable: if the library is missing, no JPEG is opened, or it gives other pixels.
    """
    from flatout.data.decoders import load_decoder
    from flatout.data.pillow import SwapInWorker, swap_decoder

    if loader.__dict__.get(SWAPPED):
        return loader
    found = load_decoder(decoder)
    if REFUSED not in loader.__dict__:
        loader.__dict__[REFUSED] = _find_trouble(loader, decoder)
    if loader.__dict__[REFUSED]:
        raise NotApplicable(loader.__dict__[REFUSED])
    if loader.num_workers:
        loader.worker_init_fn = SwapInWorker(decoder, loader.worker_init_fn)
    else:
        swap_decoder(found)
    loader.__dict__[SWAPPED] = True
    return loader


def _find_trouble(loader: Any, decoder: str) -> str:
    from flatout.data.decoders import load_decoder
    from flatout.data.pillow import swap_decoder
    from flatout.data.proof import can_be_compared, compare_ways, first_batch

    trouble = can_be_compared(loader)
    if trouble:
        return trouble
    collate = loader.collate_fn

    def swapped() -> tuple[Any, Any]:
        swap = swap_decoder(load_decoder(decoder))
        batch = first_batch(loader, collate)
        return batch, [swap.decoded, swap.compared, swap.trouble]

    proof = compare_ways(lambda: first_batch(loader, collate), swapped)
    if proof.trouble:
        return proof.trouble
    decoded, compared, reason = proof.facts
    if reason:
        return str(reason)
    return "" if decoded + compared else "no colour JPEG is opened with Pillow"
