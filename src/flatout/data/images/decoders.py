"""JPEG decoders that can stand in for Pillow's, and how each gives its pixels."""

import functools
import importlib.util
import io
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from flatout.records.errors import NotApplicable

Name: TypeAlias = Literal["simplejpeg", "opencv"]
PACKAGES: dict[Name, str] = {
    "simplejpeg": "simplejpeg",
    "opencv": "cv2",
}
"""Name of the decoder -> module that has it, in the order in which they are offered."""
HINTS = {
    "simplejpeg": "pip install 'flatout[jpeg]'",
    "opencv": "install opencv-python",
}

MEASURED = 9
"""Times that both decoders are timed, in turns; the best of each counts."""
UNKNOWN_RATIO = 0.7
"""0.67 to 0.84 were measured with Pillow 13 on two machines, 1.0 on a third."""
END = b"\xff\xd9"
"""Marker of the end of a picture."""
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


def installed() -> tuple[Name, ...]:
    """Return the names of the decoders whose packages are there, importing none."""
    return tuple(name for name in PACKAGES if importlib.util.find_spec(PACKAGES[name]))


def load_decoder(name: Name) -> Decoder:
    """Return a decoder by name."""
    makers: dict[Name, Callable[[], Decoder]]
    makers = {"simplejpeg": _simplejpeg, "opencv": _opencv}
    try:
        return makers[name]()
    except (ImportError, OSError) as error:
        # A wheel for another torch fails in the loader of its libraries.
        why = f"{PACKAGES[name]} cannot be imported ({error}); {HINTS[name]}"
        raise NotApplicable(why) from error


@functools.cache
def decoding_ratio(name: Name) -> float:
    """Return a decoder's time over Pillow's for the same photograph, on this machine and now.

    `UNKNOWN_RATIO` where one of the two is not installed. It depends on Pillow's version above all:
    the libraries are of one family.
    """
    try:
        from PIL import Image

        decode = load_decoder(name).decode
    except (ImportError, NotApplicable):
        return UNKNOWN_RATIO
    stream = io.BytesIO()
    noise = Image.effect_noise((500, 375), 60).convert("RGB")
    noise.save(stream, "JPEG", quality=90)
    data = stream.getvalue()
    pillow: Any = Image
    ways: tuple[Callable[[], Any], ...] = (
        lambda: pillow.open(io.BytesIO(data)).load(),
        lambda: _opened(pillow, data, decode),
    )
    best = [math.inf, math.inf]
    for _ in range(MEASURED):
        for place, way in enumerate(ways):
            began = time.thread_time()
            way()
            best[place] = min(best[place], time.thread_time() - began)
    return best[1] / best[0]


def _opened(pillow: Any, data: bytes, decode: Callable[[bytes], Any]) -> None:
    """Do what decoding by another library takes: Pillow still reads the header."""
    pillow.open(io.BytesIO(data))
    decode(data)


class Buffers(threading.local):
    """Memory for pixels that is used again once no one refers to it: new memory is faulted in.

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


def refuse_cut(data: bytes) -> None:
    r"""Leave a file without its end to Pillow, which knows what to say: others fill it up in grey.

    >>> refuse_cut(b"\xff\xd8 picture \xff\xd9\0\0")
    """
    if not data.rstrip(b"\0").endswith(END):
        raise ValueError("the file is cut off")


def _opencv() -> Decoder:
    import cv2
    import numpy as np

    torch = sys.modules.get("torch")
    if torch is not None and torch.utils.data.get_worker_info() is not None:
        cv2.setNumThreads(0)  # the workers are the parallel part; elsewhere the script uses it, too
    # Without the flag OpenCV turns the picture by its EXIF orientation; Pillow does not.
    flags = cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION

    def decode(data: bytes) -> Any:
        refuse_cut(data)
        found = cv2.imdecode(np.frombuffer(data, np.uint8), flags)
        if found is None:
            raise ValueError("OpenCV cannot decode this file")
        return found

    return Decoder(name="opencv", decode=decode, layout="BGR")
