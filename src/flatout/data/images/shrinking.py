"""Decode large JPEGs at a half, a quarter or an eighth where the script makes them small anyway.

A block of a JPEG holds frequencies; from the lowest of them comes the picture at a fraction of its
size, without the work for the rest. Pixels are then not those of the script: what remains is
resized by its own filter, from a picture that is still `gap` times as large as what comes out.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from PIL import Image, JpegImagePlugin

from flatout.agent import patching
from flatout.data.images import regions
from flatout.data.images.decoders import Buffers
from flatout.data.images.regions import (
    PIXEL_BYTES,
    Box,
    File,
    Later,
    file_of,
    image_over,
    inside,
    rounded,
)
from flatout.data.images.resizing import find_asked
from flatout.data.images.substitution import SubstituteState

FRACTIONS = (8, 4, 2)
"""What libjpeg-turbo decodes quickly: one over these."""
Decode: TypeAlias = Callable[..., bool]
"""`flatout.kernels.region.decode_region`."""


@dataclass(slots=True, kw_only=True)
class ShrinkSwap(SubstituteState):
    """What became of the swap in this process."""

    decode: Decode
    gap: float
    """Times that the decoded part stays larger than what is made of it, in width and height."""
    buffers: Buffers = field(default_factory=Buffers)


_ACTIVE: list[ShrinkSwap] = []
"""The swap of this process; at most one."""


def swap_shrinking(decode: Decode, gap: float) -> ShrinkSwap:
    """Let large JPEGs of Pillow's be decoded smaller where they are resized; return the swap."""
    if _ACTIVE:
        return _ACTIVE[0]
    swap = ShrinkSwap(decode=decode, gap=gap)
    parts = regions.swap_regions(decode)
    kind = JpegImagePlugin.JpegImageFile
    patches = [patching.swapped(kind, each.__name__, each) for each in (convert, crop, resize)]

    def undo() -> None:
        if swap in _ACTIVE:
            for patch in patches:
                patch.undo()
            _ACTIVE.clear()
            parts.undo()

    swap.undo = undo
    _ACTIVE.append(swap)
    return swap


class Shrinkable(Later):
    """A colour image, or a part of one, that waits for what becomes of it."""

    def __init__(self, file: File, info: dict[Any, Any], box: Box | None = None) -> None:
        super().__init__(file, info)
        self.box = box or (0, 0, *file.size)
        self._size = (self.box[2] - self.box[0], self.box[3] - self.box[1])

    def load(self) -> Any:
        """Decode the part at its full size, and be a plain image from now on."""
        box, file, size = self.__dict__.pop("box"), self.file, self._size
        self._size = file.size
        if size == file.size:
            return super().load()
        made = regions.crop(Later(file, self.info), box)
        self.__dict__.pop("file")
        self.__class__ = Image.Image  # type: ignore[assignment]
        self._size, self.im = size, made.im
        return Image.Image.load(self)

    def crop(self, box: Any = None) -> Any:
        """Cut a part out, for later."""
        edges = rounded(box)
        if edges is None:
            return Image.Image.crop(self, box)
        (left, top, right, bottom), (width, height) = edges, self._size
        if not (0 <= left < right <= width and 0 <= top < bottom <= height):
            return Image.Image.crop(self, box)
        x, y = self.box[:2]
        return Shrinkable(self.file, self.info, (x + left, y + top, x + right, y + bottom))

    def resize(
        self, size: Any, resample: Any = None, box: Any = None, reducing_gap: Any = None
    ) -> Any:
        """Resize what was decoded as small as the gap allows."""
        asked = find_asked(self._size, size, resample, box) if reducing_gap is None else None
        made = None if asked is None else _shrunk(self, *asked)
        if made is not None:
            return made
        whole = self.box == (0, 0, *self.file.size)
        if whole and box is not None:
            return regions.resize(self, size, resample, box, reducing_gap)
        self.load()
        return Image.Image.resize(self, size, resample, box, reducing_gap)


def convert(image: Any, mode: Any = None, *options: Any, **named: Any) -> Any:
    """Leave a colour image that stays one for later."""
    found = regions.convert(image, mode, *options, **named)
    return Shrinkable(found.file, found.info) if type(found) is Later else found


def crop(image: Any, box: Any = None) -> Any:
    """Cut a part out of a JPEG that was not decoded, for later."""
    file = file_of(image)
    if file is None:
        return Image.Image.crop(image, box)
    return Shrinkable(file, image.info).crop(box)


@functools.wraps(Image.Image.resize)
def resize(image: Any, size: Any, *options: Any, **named: Any) -> Any:
    """Resize a JPEG that was not decoded."""
    file = file_of(image)
    if file is None:
        return Image.Image.resize(image, size, *options, **named)
    return Shrinkable(file, image.info).resize(size, *options, **named)


def fraction_of(part: tuple[float, float], to_size: tuple[int, int], gap: float) -> int:
    """Return by how much a part may be shrunk before it is resized; 1 for not at all.

    >>> fraction_of((4000, 3000), (224, 224), 2.0), fraction_of((500, 375), (224, 224), 2.0)
    (4, 1)
    """
    room = min(side / (gap * to) for side, to in zip(part, to_size, strict=True))
    return next((by for by in FRACTIONS if by <= room), 1)


def _shrunk(image: Shrinkable, to_size: tuple[int, int], kind: int, box: Any) -> Any:
    """Return the part resized from a smaller picture; None where that is not worth it."""
    (swap,) = _ACTIVE
    left, top, right, bottom = box
    by = fraction_of((right - left, bottom - top), to_size, swap.gap)
    if by == 1:
        return None
    file, (x, y, end_x, end_y) = image.file, image.box
    size = (-(-file.size[0] // by), -(-file.size[1] // by))
    # Only what is inside the part may show, as if it had been cut out at its full size.
    edges = (x // by, y // by, -(-end_x // by), -(-end_y // by))
    area = inside(size, edges, most=1.0)
    if area is None:
        return None
    pixels = swap.buffers.take(PIXEL_BYTES * size[0] * size[1])
    if not swap.decode(file.data, size, area, pixels.ctypes.data, PIXEL_BYTES, by):
        return None
    cut = Image.Image.crop(image_over(pixels, size), area)
    cut.info = image.info.copy()
    swap.made += 1
    within = [
        ((x + left) / by - area[0], area[2] - area[0]),
        ((y + top) / by - area[1], area[3] - area[1]),
        ((x + right) / by - area[0], area[2] - area[0]),
        ((y + bottom) / by - area[1], area[3] - area[1]),
    ]
    return Image.Image.resize(cut, to_size, kind, tuple(min(at, end) for at, end in within))
