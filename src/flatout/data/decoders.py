"""JPEG decoders that can stand in for Pillow's, and how each gives its pixels."""

import importlib.util
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flatout.core.errors import NotApplicable

PACKAGES = {"simplejpeg": "simplejpeg", "opencv": "cv2"}
"""Name of the decoder -> module that has it, the fastest first."""

MAX_BUFFERS = 8
"""Images in flight in one thread whose memory is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One way to turn the bytes of a JPEG into pixels."""

    name: str
    decode: Callable[[bytes], Any]
    """Returns an array of height, width and channels; raises on anything unusual."""
    layout: str
    """Order of the channels, in Pillow's words."""


def installed() -> tuple[str, ...]:
    """Return the names of the decoders whose packages are there, importing none."""
    return tuple(name for name, module in PACKAGES.items() if importlib.util.find_spec(module))


def load_decoder(name: str) -> Decoder:
    """Return a decoder by name.

    Raises:
        NotApplicable: if its package is not installed.
    """
    try:
        return _simplejpeg() if name == "simplejpeg" else _opencv()
    except ImportError as error:
        hint = "pip install 'flatout[jpeg]'" if name == "simplejpeg" else "install opencv-python"
        raise NotApplicable(f"{PACKAGES[name]} cannot be imported ({error}); {hint}") from error


class Buffers(threading.local):
    """Memory for pixels that is used again once nobody refers to it: new memory is faulted in.

    Decoding into memory that is there took 0.73 ms, into new memory 0.95 ms (measured).
    """

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def take(self, count: int) -> Any:
        """Return a buffer of at least so many bytes."""
        import numpy as np

        for place in range(len(self.kept)):
            # Two references: the list's and the argument's. An image that lives has one more.
            if sys.getrefcount(self.kept[place]) == 2 and self.kept[place].size >= count:
                return self.kept[place]
        made = np.empty(count, np.uint8)
        self.kept = [*self.kept[1 - MAX_BUFFERS :], made]
        return made


def _simplejpeg() -> Decoder:
    import simplejpeg

    buffers = Buffers()

    def decode(data: bytes) -> Any:
        height, width, *_ = simplejpeg.decode_jpeg_header(data)
        # Four bytes per pixel is how Pillow keeps them: they become its image without a copy.
        buffer = buffers.take(4 * height * width)
        return simplejpeg.decode_jpeg(data, colorspace="RGBX", buffer=buffer)

    return Decoder(name="simplejpeg", decode=decode, layout="RGBX")


def _opencv() -> Decoder:
    import cv2
    import numpy as np

    cv2.setNumThreads(0)  # the loader's workers are the parallel part
    # Without the flag OpenCV turns the picture by its EXIF orientation; Pillow does not.
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION

    def decode(data: bytes) -> Any:
        found = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if found is None:
            raise ValueError("OpenCV cannot decode this file")
        return found

    return Decoder(name="opencv", decode=decode, layout="BGR")
