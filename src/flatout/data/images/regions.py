"""Decode of Pillow's JPEGs only the part that is cut out of them.

`Image.open(...)` and `convert("RGB")` give an image whose pixels are not made yet. If the first
thing that is asked of it is a part (`crop`, or `resize` with a box), that part is decoded, in its
place among pixels that no one reads; whatever else is asked decodes the whole, as always.
"""

import functools
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from PIL import Image, JpegImagePlugin

from flatout.agent import patching
from flatout.data.images.decoders import Buffers
from flatout.data.images.pillow import is_keeping, is_plain, kind_of
from flatout.data.images.resizing import find_asked
from flatout.data.images.substitution import SubstituteState
from flatout.kernels.region import END

MOST_PART = 0.9
"""Of the pixels: a larger part is decoded with the whole, which other parts can be cut out of."""
PIXEL_BYTES = 4
REACH = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 1.0}
"""Pixels of the result that a filter reaches to each side, by Pillow's number of it."""
core: Any = vars(Image)["core"]
Box: TypeAlias = tuple[int, int, int, int]
Decode: TypeAlias = Callable[[bytes, tuple[int, int], Box, int], bool]
"""File, size, part, and address of the whole's pixels to success."""


@dataclass(slots=True, kw_only=True)
class RegionSwap(SubstituteState):
    """What became of the swap in this process; its kinds are those of `pillow.kind_of`."""

    decode: Decode
    buffers: Buffers = field(default_factory=Buffers)


_ACTIVE: list[RegionSwap] = []
"""The swap of this process; at most one."""
PARTED = "_flatout_parted"
"""On an image: a part was decoded. Who asks for a second one gets the whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """A JPEG that was read and not decoded."""

    data: bytes
    size: tuple[int, int]
    kind: Any
    """Sampling of the channels and what else the way of decoding depends on."""


def swap_regions(decode: Decode) -> RegionSwap:
    """Let parts of Pillow's JPEGs be decoded alone; return what becomes of it."""
    if _ACTIVE:
        return _ACTIVE[0]
    swap = RegionSwap(decode=decode)
    kind = JpegImagePlugin.JpegImageFile
    patches = [patching.swapped(kind, each.__name__, each) for each in (convert, crop, resize)]

    def undo() -> None:
        if swap in _ACTIVE:
            for patch in patches:
                patch.undo()
            _ACTIVE.clear()

    swap.undo = undo
    _ACTIVE.append(swap)
    return swap


class Later(Image.Image):
    """A colour image whose pixels have not been asked for; a plain image once they are."""

    def __init__(self, file: File, info: dict[Any, Any]) -> None:
        super().__init__()
        self.file = file
        self._mode, self._size, self.info = "RGB", file.size, info.copy()

    def load(self) -> Any:
        """Decode the whole, and be a plain image from now on."""
        file = self.__dict__.pop("file")
        self.__class__ = Image.Image  # type: ignore[assignment]
        whole = Image.open(io.BytesIO(file.data))
        whole.load()
        self.im = whole.im
        return Image.Image.load(self)

    @property
    def im(self) -> Any:
        """The pixels."""
        self.load()
        return self._im

    @im.setter
    def im(self, im: Any) -> None:
        self._im = im

    def crop(self, box: Any = None) -> Any:
        """Cut a part out, decoding no more than that."""
        return crop(self, box)

    def resize(self, size: Any, *options: Any, **named: Any) -> Any:
        """Resize a part, decoding no more than that."""
        return resize(self, size, *options, **named)

    def __eq__(self, other: object) -> bool:
        """Compare as a plain image."""
        self.load()
        return bool(self == other)

    __hash__ = None  # type: ignore[assignment]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be pickled as a plain image."""
        self.load()
        return self.__reduce_ex__(protocol)


def convert(image: Any, mode: Any = None, *options: Any, **named: Any) -> Any:
    """Leave a colour image that stays one for later."""
    is_same = mode == "RGB" and not options and not named and "transparency" not in image.info
    file = file_of(image) if is_same else None
    # A script may go on after a truncated file: its error has to come here, where it always did.
    if file is None or not file.data.endswith(END):
        return Image.Image.convert(image, mode, *options, **named)
    return Later(file, image.info)


def crop(image: Any, box: Any = None) -> Any:
    """Cut a part out, decoding no more than that where the image is not decoded yet."""
    part = _part_of_crop(image.size, box)
    found = _made(image, part, lambda of: Image.Image.crop(of, box)) if part else None
    return Image.Image.crop(image, box) if found is None else found


@functools.wraps(Image.Image.resize)
def resize(
    image: Any, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
) -> Any:
    """Resize a part, decoding no more than that where the image is not decoded yet."""

    def of(whole: Any) -> Any:
        return Image.Image.resize(whole, size, resample, box, reducing_gap)

    part = _part_of_resize(image.size, size, resample, box) if reducing_gap is None else None
    found = _made(image, part, of) if part else None
    return of(image) if found is None else found


def _part_of_crop(size: tuple[int, int], box: Any) -> Box | None:
    """Return the pixels that a cut needs, as Pillow rounds them.

    >>> _part_of_crop((9, 9), (1.4, -2, 4, 5.6)), _part_of_crop((9, 9), None)
    ((1, 0, 4, 6), None)
    """
    edges = rounded(box)
    return None if edges is None else inside(size, edges)


def rounded(box: Any) -> Box | None:
    """Return the edges of a box as Pillow rounds them; None for what is no box."""
    try:
        left, top, right, bottom = (round(edge) for edge in box)
    except (TypeError, ValueError, OverflowError):
        return None
    return left, top, right, bottom


def _part_of_resize(size: tuple[int, int], to_size: Any, kind: Any, box: Any) -> Box | None:
    """Return the pixels that a resized part is made of: a filter reaches beyond its edges.

    >>> _part_of_resize((90, 90), (8, 8), 2, (20, 30, 36, 46))
    (17, 27, 39, 49)
    """
    asked = None if box is None else find_asked(size, to_size, kind, box)
    if asked is None:
        return None
    (width, height), number, (left, top, right, bottom) = asked
    across = REACH[number] * max(1.0, (right - left) / width) + 1
    down = REACH[number] * max(1.0, (bottom - top) / height) + 1
    edges = (math.floor(left - across), math.floor(top - down))
    return inside(size, (*edges, math.ceil(right + across), math.ceil(bottom + down)))


def inside(size: tuple[int, int], box: Box, most: float = MOST_PART) -> Box | None:
    """Return what of a part is inside; None if that is nothing, or more than `most` of it."""
    width, height = size
    left, top = max(0, box[0]), max(0, box[1])
    right, bottom = min(width, box[2]), min(height, box[3])
    if left >= right or top >= bottom:
        return None
    part = (right - left) * (bottom - top)
    return (left, top, right, bottom) if part <= most * width * height else None


def file_of(image: Any) -> File | None:
    """Return the file of an image of whose pixels nothing was asked yet; None if it is no such."""
    if not _ACTIVE or _ACTIVE[0].trouble or is_keeping():
        return None
    if isinstance(image, Later):
        return image.file
    if not is_plain(image):
        return None
    stream = image.fp
    try:
        stream.seek(0)
        data = stream.read()
    except (OSError, ValueError, AttributeError):
        return None  # Pillow's own error is the right one
    # As decoding does; what was read can still be decoded, wherever the file is by then.
    if image._exclusive_fp and image._close_exclusive_fp_after_loading:
        stream.close()
        image.fp = io.BytesIO(data)
    return File(data=data, size=image.size, kind=kind_of(image))


def _made(image: Any, part: Box, make: Callable[[Any], Any]) -> Any:
    """Return what is made of the part; None where the whole has to be decoded."""
    file = None if image.__dict__.get(PARTED) else file_of(image)
    if file is None:
        return None
    image.__dict__[PARTED] = True
    (swap,) = _ACTIVE
    partial = _partial(swap, file, part)
    if partial is None:
        return None
    partial.info = image.info
    made = make(partial)
    if not swap.is_compared(file.kind):
        swap.made += 1
        return made
    return _compared(swap, image, made, make)


def _partial(swap: RegionSwap, file: File, part: Box) -> Any:
    """Return an image of which only the part is valid; None if it cannot be decoded."""
    width, height = file.size
    pixels = swap.buffers.take(PIXEL_BYTES * width * height)
    if not swap.decode(file.data, file.size, part, pixels.ctypes.data):
        return None
    return image_over(pixels, file.size)


def image_over(pixels: Any, size: tuple[int, int]) -> Any:
    """Return an image whose memory is that of an array with four bytes a pixel."""
    image: Any = Image.Image()
    image.im = core.map_buffer(pixels, size, "raw", 0, ("RGB", 0, 1))
    image._mode, image._size = "RGB", size
    return image


def _compared(swap: RegionSwap, image: Any, made: Any, make: Callable[[Any], Any]) -> Any:
    image.load()
    expected = make(image)
    swap.compared += 1
    if made.size != expected.size or made.tobytes() != make(image).tobytes():
        swap.trouble = f"a part of an image of {image.width} x {image.height} comes out different"
    return expected
