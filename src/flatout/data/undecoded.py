"""JPEGs whose size is known, of which only the part that is cut out is made into pixels."""

import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from flatout.data.crops import HEIGHT, LEFT, TOP, WIDTH
from flatout.data.decoders import Buffers
from flatout.kernels.region import can_decode, decode_region

CHANNELS = 3
START = b"\xff\xd8"
FILL = 0xFF
FRAMES = frozenset({0xC0, 0xC1, 0xC2})
"""Markers of what libjpeg decodes: baseline, extended and progressive; ITU-T T.81, table B.1."""
ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a length."""
FACTS = struct.Struct(">HBHHB")
"""Of a frame: length, bits, height, width, components; T.81, B.2.2."""
BITS = 8
BUFFERS = Buffers()


class Undecoded:
    """A picture of a packed store that was not decoded yet."""

    __slots__ = ("file", "shape", "whole")

    def __init__(
        self, file: bytes, shape: tuple[int, int, int], whole: Callable[[], torch.Tensor]
    ) -> None:
        self.file, self.shape, self.whole = file, shape, whole

    def part(self, box: Sequence[int]) -> torch.Tensor:
        """Return height x width x 3 bytes that are valid inside the box alone.

        The memory is used again once nobody refers to it.
        """
        height, width, _ = self.shape
        edges = (box[LEFT], box[TOP], box[LEFT] + box[WIDTH], box[TOP] + box[HEIGHT])
        pixels = BUFFERS.take(height * width * CHANNELS)
        if not decode_region(self.file, (width, height), edges, pixels.ctypes.data, CHANNELS):
            return self.whole()
        return torch.from_numpy(pixels)[: height * width * CHANNELS].view(self.shape)


def undecoded(file: Any, whole: Callable[[], torch.Tensor]) -> Undecoded | None:
    """Return the file of a picture, to be decoded in parts; None where that cannot be.

    Args:
        file: Its bytes.
        whole: Decodes all of it: the way where the library finds fault with the file.
    """
    if not isinstance(file, bytes) or not can_decode():
        return None
    size = jpeg_size(file)
    return None if size is None else Undecoded(file, (*size, CHANNELS), whole)


def jpeg_size(file: bytes) -> tuple[int, int] | None:
    """Return height and width from a JPEG's header; None for what is no plain colour JPEG."""
    at = len(START)
    while file.startswith(START) and at + 2 + FACTS.size <= len(file) and file[at] == FILL:
        marker = file[at + 1]
        length, bits, height, width, components = FACTS.unpack_from(file, at + 2)
        if marker in FRAMES:
            is_plain = bits == BITS and components == CHANNELS and height > 0 and width > 0
            return (height, width) if is_plain else None
        at += 1 if marker == FILL else 2 if marker in ALONE else 2 + length
    return None
