"""Other code under Pillow in the script's process: a decoder, a resampler, a store of pixels.

`swap_decoder` and `swap_resize` act where they were seen to give the same pixels. `keep_decoded`
keeps what Pillow decoded: a photograph that is loaded again is copied instead of decoded.
"""

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from flatout.agent import patching
from flatout.data.caching import ByteStore
from flatout.data.images.decoders import Decoder
from flatout.data.images.substitution import SubstituteState, put_on

MODES = {"L": 1, "RGB": 3, "CMYK": 4, "RGBA": 4}
"""Modes that are kept, with their bytes a pixel: images whose pixels are all there is of them."""
FORMATS = frozenset({"JPEG", "MPO", "PNG", "BMP", "PPM"})
"""Formats that are kept. Not TIFF: Pillow turns such a picture while it loads it and takes the
orientation out of its tags, and what comes here of TIFF is not compressed: nothing is saved."""


_ACTIVE: list[ByteStore] = []
"""The store of this process, the latest last."""


def is_keeping() -> bool:
    """Return whether this process keeps what it decodes."""
    return bool(_ACTIVE)


def keep_decoded(store: ByteStore) -> Callable[[], None]:
    """Let Pillow's loading look into the store first; return what undoes that.

    For data sets that change their samples at random: what is before the randomness, the decoding
    of a file, is the same each time. `Image.open` still reads the header, so that size, mode,
    format and EXIF are what they always were; only the pixels come from the store.
    """
    from PIL import ImageFile

    _ACTIVE.append(store)
    patch = patching.wrap(ImageFile.ImageFile, "load", through_store)

    def undo() -> None:
        turn_keeping(store, is_on=False)
        patch.undo()

    return undo


def turn_keeping(store: ByteStore, *, is_on: bool) -> None:
    """Have Pillow's loading look into a store that it was given, or no more for now."""
    if is_on and store not in _ACTIVE:
        _ACTIVE.append(store)
    elif not is_on and store in _ACTIVE:
        _ACTIVE.remove(store)


def through_store(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a way to load an image that looks into this process's store first, if it has one."""

    @functools.wraps(original)
    def load(image: Any) -> Any:
        from PIL import Image

        if not _ACTIVE:
            return original(image)
        store = _ACTIVE[-1]
        key = _key_of(image)
        if key is None:
            return original(image)
        found = store.find(key)
        if found is not None:
            _take(image, found)
            return Image.Image.load(image)
        before = pickle.dumps(image.info)
        access = original(image)
        # A format that tells more at the end of its file has to be read to the end again.
        if pickle.dumps(image.info) == before:
            store.add(key, [image.tobytes()])
        return access

    return load


def _key_of(image: Any) -> int | None:
    """Return a number for the file as it is there now and the way it is decoded."""
    if not image.tile or image.format not in FORMATS or image.mode not in MODES:
        return None
    file = getattr(image, "fp", None)
    try:
        facts = os.fstat(file.fileno())  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):
        return None  # bytes in memory, or closed: no name to know them by
    what = (
        *(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns),
        *(image.mode, image.size, image.tell(), image.format),
        *(repr(image.tile), repr(getattr(image, "decoderconfig", ""))),
    )
    digest = hashlib.blake2b(repr(what).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") or 1


def _take(image: Any, pixels: memoryview) -> None:
    """Give the image its pixels and leave it as a load leaves it."""
    from PIL import Image

    image.im = Image.frombytes(image.mode, image.size, bytes(pixels)).im
    image.tile = []
    if getattr(image, "_exclusive_fp", False) and getattr(
        image, "_close_exclusive_fp_after_loading", False
    ):
        with contextlib.suppress(AttributeError, OSError):
            image.fp.close()
        image.fp = None


@dataclass(slots=True, kw_only=True)
class DecoderSwap(SubstituteState):
    """What became of the swap in this process; its kinds are those of `kind_of`."""

    decoder: Decoder


def swap_decoder(decoder: Decoder) -> DecoderSwap:
    """Put a decoder under Pillow's JPEG images, for this process; return what becomes of it.

    Only plain colour JPEGs that are loaded whole take the other way; whatever is unusual (`draft`,
    CMYK, grey, several tiles, a subclass, a truncated file) stays with Pillow, with its own errors.
    """
    from PIL import Image, JpegImagePlugin

    def patch(swap: DecoderSwap) -> list[patching.Patch]:
        def decoding(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
            @functools.wraps(original)
            def load(image: Any) -> Any:
                if swap.rests or not is_plain(image) or not _decode(swap, image, original):
                    return original(image)
                return Image.Image.load(image)

            return through_store(load)

        return [patching.wrap(JpegImagePlugin.JpegImageFile, "load", decoding)]

    return put_on(DecoderSwap(decoder=decoder), patch)


def is_plain(image: Any) -> bool:
    """Return whether an image of Pillow's is a colour JPEG about to be decoded whole."""
    from PIL import ImageFile, JpegImagePlugin

    if type(image) is not JpegImagePlugin.JpegImageFile or image.mode != "RGB":
        return False
    if len(image.tile) != 1 or image.decoderconfig or image._im is not None:
        return False
    name, extents, offset, args = image.tile[0]
    is_whole = extents == (0, 0, *image.size) and offset == 0
    is_usual = name == "jpeg" and args == ("RGB", "") and image.layers == 3
    return bool(is_whole and is_usual and not ImageFile.LOAD_TRUNCATED_IMAGES)


def kind_of(image: Any) -> tuple[Any, ...]:
    """Return what decoding depends on: sampling of the channels, progressive, colour transform."""
    info = image.info
    return (tuple(image.layer), "progressive" in info, info.get("adobe_transform"))


def _decode(swap: DecoderSwap, image: Any, original: Callable[[Any], Any]) -> bool:
    """Give the image its pixels; False leaves it to Pillow as if nothing had happened."""
    file = image.fp
    try:
        file.seek(0)
        pixels = swap.decoder.decode(file.read())
        height, width, channels = pixels.shape
    except Exception:  # noqa: BLE001  a broken file among others: Pillow's own error is the right one
        return False
    if (width, height) != image.size or channels != len(swap.decoder.layout):
        return False
    if swap.is_compared(kind_of(image)):
        _compare(swap, image, pixels, original)
        return True
    _give_pixels(image, pixels, swap.decoder.layout)
    image.tile = []
    image.readonly = 0
    if image._exclusive_fp and image._close_exclusive_fp_after_loading:
        file.close()
    image.fp = None
    swap.made += 1
    return True


def _give_pixels(image: Any, pixels: Any, layout: str) -> None:
    """Make the decoded array the image's own memory, or copy it there if it is laid out otherwise.

    Pillow keeps four bytes per colour pixel, so that an array of these needs no copy.
    """
    from PIL import Image

    if layout == "RGBX" and pixels.flags.c_contiguous:
        core: Any = vars(Image)["core"]
        image.im = core.map_buffer(pixels, image.size, "raw", 0, ("RGB", 0, 1))
        return
    image.load_prepare()
    raw = Image._getdecoder("RGB", "raw", (layout, 0, 1))
    raw.setimage(image.im, (0, 0, *image.size))
    raw.decode(memoryview(pixels).cast("B"))


def _compare(swap: DecoderSwap, image: Any, pixels: Any, original: Callable[[Any], Any]) -> None:
    """Let Pillow decode, and look whether the other decoder gave the same."""
    import numpy as np

    original(image)
    theirs = np.frombuffer(image.tobytes(), np.uint8).reshape(pixels.shape[0], -1, 3)
    order = [swap.decoder.layout.index(channel) for channel in "RGB"]
    swap.compared += 1
    if not np.array_equal(pixels[..., order], theirs):
        name = getattr(image, "filename", "") or "an image"
        swap.trouble = f"{swap.decoder.name} decodes {name} to other pixels than Pillow"


BICUBIC = 3
"""Pillow's filter for colour where none is named."""
FILTERS = frozenset({1, 2, 3, 4, 5})
"""Lanczos, bilinear, bicubic, box and Hamming, by Pillow's numbers."""
Resample: TypeAlias = Callable[[Any, tuple[int, int], int, tuple[float, ...]], Any]
"""Image, size, filter and box to an image; None where it cannot."""
Asked: TypeAlias = tuple[tuple[int, int], int, tuple[float, float, float, float]]


@dataclass(slots=True, kw_only=True)
class ResizeSwap(SubstituteState):
    """What became of the swap in this process; its kinds are filters."""

    resample: Resample


def swap_resize(resample: Resample) -> ResizeSwap:
    """Put a resampler under Pillow's `resize`, for this process; return what becomes of it.

    Only RGB images whose memory is in one piece take the other way, with the five filters that
    average; whatever is unusual (`reducing_gap`, another mode, a box outside the image) stays with
    Pillow, with its own errors.
    """
    from PIL import Image

    def patch(swap: ResizeSwap) -> list[patching.Patch]:
        def resampling(original: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(original)
            def resize(
                image: Any,
                size: Any,
                resample: Any = None,
                box: Any = None,
                reducing_gap: Any = None,
            ) -> Any:
                is_usual = image.mode == "RGB" and reducing_gap is None and not swap.rests
                asked = find_asked(image.size, size, resample, box) if is_usual else None
                if asked is None:
                    return original(image, size, resample, box, reducing_gap)
                image.load()
                return _resized(swap, image, asked, original)

            return resize

        return [patching.wrap(Image.Image, "resize", resampling)]

    return put_on(ResizeSwap(resample=resample), patch)


def find_asked(image_size: tuple[int, int], size: Any, resample: Any, box: Any) -> Asked | None:
    """Return what a call of `resize` asks for; None where Pillow should answer itself.

    >>> find_asked((8, 6), (4, 3), None, None)
    ((4, 3), 3, (0, 0, 8, 6))
    >>> find_asked((8, 6), (8, 6), 2, None), find_asked((8, 6), (4, 3), 2, (0, 0, 9, 6))
    (None, None)
    """
    try:
        width, height = size
        kind = BICUBIC if resample is None else int(resample)
        whole = (0, 0, *image_size)
        left, top, right, bottom = edges = whole if box is None else tuple(box)
        fits = 0 <= left < right <= image_size[0] and 0 <= top < bottom <= image_size[1]
    except (TypeError, ValueError):
        return None
    is_made = type(width) is int and type(height) is int and width > 0 and height > 0
    is_copy = (width, height) == tuple(image_size) and edges == whole
    if not (fits and is_made) or is_copy or kind not in FILTERS:
        return None
    return (width, height), kind, (left, top, right, bottom)


def _resized(swap: ResizeSwap, image: Any, asked: Asked, original: Callable[..., Any]) -> Any:
    size, kind, box = asked
    made = swap.resample(image, size, kind, box)
    if made is None:
        return original(image, size, kind, box)
    if not swap.is_compared(kind):
        swap.made += 1
        return made
    expected = original(image, size, kind, box)
    swap.compared += 1
    if made.tobytes() != expected.tobytes():
        swap.trouble = f"an image of {image.width} x {image.height} comes out different"
    return expected
