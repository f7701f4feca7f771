"""Decode of Pillow's JPEGs only what becomes of them: the part that is cut out, or a smaller one.

`Image.open(...)` and `convert("RGB")` give an image whose pixels are not made yet. If the first
thing that is asked of it is a part (`crop`, or `resize` with a box), that part is decoded, in its
place among pixels that no one reads; whatever else is asked decodes the whole, as always.

Where pixels may differ a little, large photographs are decoded at a half, a quarter or an eighth.
A block of a JPEG holds frequencies; from the lowest of them comes the picture at a fraction of its
size, without the work for the rest. What remains is resized by the script's own filter, from a
picture that is still `gap` times as large as what comes out.
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
from flatout.data.images.pillow import find_asked, is_keeping, is_plain, kind_of
from flatout.data.images.substitution import SubstituteState, find_swap, put_on
from flatout.kernels.region import END

MOST_PART = 0.9
"""Of the pixels: a larger part is decoded with the whole, which other parts can be cut out of."""
PIXEL_BYTES = 4
REACH = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 1.0}
"""Pixels of the result that a filter reaches to each side, by Pillow's number of it."""
FRACTIONS = (8, 4, 2)
"""What libjpeg-turbo decodes quickly: one over these."""
LAZY = "_flatout_lazy"
"""On a JPEG that was not decoded: what stands for it once a part was asked for."""
core: Any = vars(Image)["core"]
Box: TypeAlias = tuple[int, int, int, int]
Decode: TypeAlias = Callable[..., bool]
"""`flatout.kernels.region.decode_region`."""


@dataclass(slots=True, kw_only=True)
class RegionSwap(SubstituteState):
    """What became of decoding parts in this process; its kinds are those of `pillow.kind_of`."""

    decode: Decode
    buffers: Buffers = field(default_factory=Buffers)


@dataclass(slots=True, kw_only=True)
class ShrinkSwap(SubstituteState):
    """What became of decoding smaller pictures in this process."""

    regions: RegionSwap
    gap: float
    """Times that the decoded part stays larger than what is made of it, in width and height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JpegFile:
    """A JPEG that was read and not decoded."""

    data: bytes
    size: tuple[int, int]
    kind: Any
    """Sampling of the channels and what else the way of decoding depends on."""

    @property
    def box(self) -> Box:
        """The edges of the whole."""
        return (0, 0, *self.size)


def swap_regions(decode: Decode) -> RegionSwap:
    """Let parts of Pillow's JPEGs be decoded alone; return what becomes of it."""
    return put_on(RegionSwap(decode=decode), lambda _: _patched())


def swap_shrinking(decode: Decode, gap: float) -> ShrinkSwap:
    """Let large JPEGs of Pillow's be decoded smaller where they are resized; return the swap."""
    regions = RegionSwap(decode=decode)
    # It comes and goes with a swap of its own, if the script's recipe has none.
    return put_on(
        ShrinkSwap(regions=find_swap(RegionSwap) or regions, gap=gap), lambda _: _patched()
    )


def _patched() -> list[patching.Patch]:
    kind = JpegImagePlugin.JpegImageFile
    return [patching.swapped(kind, each.__name__, each) for each in (convert, crop, resize)]


def _regions() -> RegionSwap | None:
    """Return the way to decode parts that is on, None without one."""
    shrinks = find_swap(ShrinkSwap)
    return shrinks.regions if shrinks is not None else find_swap(RegionSwap)


class LazyImage(Image.Image):
    """A colour image, or a part of one, that waits for what becomes of it; then a plain image."""

    def __init__(self, file: JpegFile, info: dict[Any, Any], box: Box | None = None) -> None:
        super().__init__()
        self.file, self.box = file, box or file.box
        self.is_parted = False
        """Whether a part was decoded already: who asks for a second one gets the whole."""
        left, top, right, bottom = self.box
        self._mode, self._size, self.info = "RGB", (right - left, bottom - top), info.copy()

    def load(self) -> Any:
        """Decode it at its full size, and be a plain image from now on."""
        file, box = self.file, self.box
        for name in ("file", "box", "is_parted"):
            del self.__dict__[name]
        self.__class__ = Image.Image  # type: ignore[assignment]
        if box == file.box:
            made = Image.open(io.BytesIO(file.data))
            made.load()
        else:
            made = _cut_out(LazyImage(file, self.info), box)
        self.im = made.im
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
        """Cut a part out: at once, decoding no more than that, or later, where it may shrink."""
        edges = _rounded(box, self._size)
        if edges is None:
            return Image.Image.crop(self, box)
        if find_swap(ShrinkSwap) is None:
            return _cut_out(self, edges)
        x, y = self.box[:2]
        left, top, right, bottom = edges
        return LazyImage(self.file, self.info, (x + left, y + top, x + right, y + bottom))

    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        """Resize what was decoded as small, or as little of it, as that needs."""
        made, asked = None, None
        if reducing_gap is None:
            asked = find_asked(self._size, size, resample, box)
        if asked is not None:
            made = _shrunk(self, *asked)
            if made is None and self.box == self.file.box:
                made = _of_part(self, _reached(*asked), lambda x: Image.Image.resize(x, *asked))
        return Image.Image.resize(self, size, resample, box, reducing_gap) if made is None else made

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
    return LazyImage(file, image.info)


def crop(image: Any, box: Any = None) -> Any:
    """Cut a part out, decoding no more than that where the image is not decoded yet."""
    lazy = _lazy(image)
    return Image.Image.crop(image, box) if lazy is None else lazy.crop(box)


@functools.wraps(Image.Image.resize)
def resize(image: Any, size: Any, *options: Any, **named: Any) -> Any:
    """Resize a part, or the whole, where the image is not decoded yet."""
    lazy = _lazy(image)
    if lazy is None:
        return Image.Image.resize(image, size, *options, **named)
    return lazy.resize(size, *options, **named)


def _lazy(image: Any) -> Any:
    """Return what stands for a JPEG that was not decoded; None for any other image."""
    if not is_plain(image):
        return None
    if LAZY not in image.__dict__:
        file = file_of(image)
        image.__dict__[LAZY] = None if file is None else LazyImage(file, image.info)
    return image.__dict__[LAZY]


def file_of(image: Any) -> JpegFile | None:
    """Return the file of an image of whose pixels nothing was asked yet; None if it is no such."""
    swap = _regions()
    if swap is None or swap.rests or is_keeping() or not is_plain(image):
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
    return JpegFile(data=data, size=image.size, kind=kind_of(image))


def _rounded(box: Any, size: tuple[int, int]) -> Box | None:
    """Return the edges of a box as Pillow rounds them; None where it is not inside.

    >>> _rounded((1.4, 2, 4, 5.6), (9, 9)), _rounded((1, -2, 4, 5), (9, 9)), _rounded(None, (9, 9))
    ((1, 2, 4, 6), None, None)
    """
    try:
        left, top, right, bottom = (round(edge) for edge in box)
    except (TypeError, ValueError, OverflowError):
        return None
    is_inside = 0 <= left < right <= size[0] and 0 <= top < bottom <= size[1]
    return (left, top, right, bottom) if is_inside else None


def _reached(size: tuple[int, int], kind: int, box: tuple[float, ...]) -> Box:
    """Return the pixels that a resized part is made of: a filter reaches beyond its edges.

    >>> _reached((8, 8), 2, (20, 30, 36, 46))
    (17, 27, 39, 49)
    """
    (width, height), (left, top, right, bottom) = size, box
    across = REACH[kind] * max(1.0, (right - left) / width) + 1
    down = REACH[kind] * max(1.0, (bottom - top) / height) + 1
    edges = (math.floor(left - across), math.floor(top - down))
    return (*edges, math.ceil(right + across), math.ceil(bottom + down))


def _cut_out(image: Any, box: Box) -> Any:
    """Return a part of an image that was not decoded, as a plain image."""
    made = _of_part(image, box, lambda of: Image.Image.crop(of, box))
    return Image.Image.crop(image, box) if made is None else made


def _of_part(image: LazyImage, part: Box, make: Callable[[Any], Any]) -> Any:
    """Return what is made of a part of the whole; None where the whole has to be decoded."""
    swap, file = _regions(), image.file
    width, height = file.size
    left, top, right, bottom = part
    part = (max(0, left), max(0, top), min(width, right), min(height, bottom))
    is_small = (part[2] - part[0]) * (part[3] - part[1]) <= MOST_PART * width * height
    if swap is None or swap.rests or image.is_parted or not is_small:
        return None
    image.is_parted = True
    canvas = _decoded(swap, file, file.size, part)
    if canvas is None:
        return None
    canvas.info = image.info
    made = make(canvas)
    if not swap.is_compared(file.kind):
        swap.made += 1
        return made
    image.load()
    expected = make(image)
    swap.compared += 1
    if made.size != expected.size or made.tobytes() != expected.tobytes():
        swap.trouble = f"a part of an image of {width} x {height} comes out different"
    return expected


def _decoded(
    swap: RegionSwap, file: JpegFile, size: tuple[int, int], part: Box, by: int = 1
) -> Any:
    """Return an image of that size of which only the part is valid; None if it cannot be decoded.

    Its memory is that of an array with four bytes a pixel, and is used again once it is let go.
    """
    pixels = swap.buffers.take(PIXEL_BYTES * size[0] * size[1])
    if not swap.decode(file.data, size, part, pixels.ctypes.data, PIXEL_BYTES, by):
        return None
    image: Any = Image.Image()
    image.im = core.map_buffer(pixels, size, "raw", 0, ("RGB", 0, 1))
    image._mode, image._size = "RGB", size
    return image


def fraction_of(part: tuple[float, float], to_size: tuple[int, int], gap: float) -> int:
    """Return by how much a part may be shrunk before it is resized; 1 for not at all.

    >>> fraction_of((4000, 3000), (224, 224), 2.0), fraction_of((500, 375), (224, 224), 2.0)
    (4, 1)
    """
    room = min(side / (gap * to) for side, to in zip(part, to_size, strict=True))
    return next((by for by in FRACTIONS if by <= room), 1)


def _shrunk(image: LazyImage, to_size: tuple[int, int], kind: int, box: Any) -> Any:
    """Return the part resized from a smaller picture; None where that may not be or is no gain."""
    swap = find_swap(ShrinkSwap)
    left, top, right, bottom = box
    by = 1 if swap is None else fraction_of((right - left, bottom - top), to_size, swap.gap)
    if swap is None or by == 1:
        return None
    file, (x, y, end_x, end_y) = image.file, image.box
    size = (-(-file.size[0] // by), -(-file.size[1] // by))
    # Only what is inside the part may show, as if it had been cut out at its full size.
    area = (x // by, y // by, -(-end_x // by), -(-end_y // by))
    canvas = _decoded(swap.regions, file, size, area, by)
    if canvas is None:
        return None
    cut = Image.Image.crop(canvas, area)
    cut.info = image.info.copy()
    swap.made += 1
    within = [
        ((x + left) / by - area[0], area[2] - area[0]),
        ((y + top) / by - area[1], area[3] - area[1]),
        ((x + right) / by - area[0], area[2] - area[0]),
        ((y + bottom) / by - area[1], area[3] - area[1]),
    ]
    return Image.Image.resize(cut, to_size, kind, tuple(min(at, end) for at, end in within))
