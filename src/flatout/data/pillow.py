"""Let another decoder make the pixels of Pillow's JPEGs, where it was seen to give the same.

Only plain colour JPEGs that are loaded whole take the other way; whatever is unusual (`draft`,
CMYK, grey, several tiles, a subclass, a truncated file) stays with Pillow, with its own errors.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.data.decoded import through_store
from flatout.data.decoders import Decoder
from flatout.data.swapping import Swap


@dataclass(slots=True, kw_only=True)
class DecoderSwap(Swap):
    """What became of the swap in this process; its kinds are those of `kind_of`."""

    decoder: Decoder


_ACTIVE: list[DecoderSwap] = []
"""The swap of this process; at most one."""


def swap_decoder(decoder: Decoder) -> DecoderSwap:
    """Put a decoder under Pillow's JPEG images, for this process; return what becomes of it."""
    from PIL import Image, JpegImagePlugin

    if _ACTIVE:
        return _ACTIVE[0]
    swap = DecoderSwap(decoder=decoder)
    kind: Any = JpegImagePlugin.JpegImageFile
    original = kind.load

    @functools.wraps(original)
    def load(image: Any) -> Any:
        if swap.trouble or not is_plain(image) or not _decode(swap, image, original):
            return original(image)
        return Image.Image.load(image)

    inherits = "load" not in vars(kind)

    def undo() -> None:
        if swap not in _ACTIVE:
            return
        if inherits:
            del kind.load
        else:
            kind.load = original
        _ACTIVE.clear()

    kind.load = through_store(load)
    swap.undo = undo
    _ACTIVE.append(swap)
    return swap


def is_plain(image: Any) -> bool:
    """Tell whether an image of Pillow's is a colour JPEG about to be decoded whole."""
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
