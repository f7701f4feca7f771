"""A part of a JPEG, decoded by the library that Pillow itself decodes with.

The plain reference is Pillow: decode the whole, cut the part out. The library is the one that
Pillow has loaded, so that there is no other decoder whose arithmetic could differ.
"""

import ctypes
import functools
from pathlib import Path
from typing import Any

from flatout.kernels.compiled import load_function, load_library
from flatout.records.errors import NotApplicable

MAPS = Path("/proc/self/maps")
OWN = "pillow.libs"
"""Folder, in lower case, in which Pillow's wheels bring their libraries along."""
TROUBLES = {
    1: "does not open a second time",
    2: "cannot decode parts",
    3: "has another interface than libjpeg-turbo's 6.2",
}
END = b"\xff\xd9"
"""Marks the end of a JPEG. Rows below the part are not read: a file that was cut off would not be
noticed there, and is left to Pillow."""


def decode_region(
    data: bytes,
    size: tuple[int, int],
    box: tuple[int, ...],
    pixels: int,
    pixel_bytes: int = 4,
    shrink: int = 1,
) -> bool:
    """Decode a part of a colour JPEG into its place among the pixels of the whole.

    Args:
        data: The file.
        size: Width and height of the whole, in pixels.
        box: Left, top, right and bottom of the part, inside the whole and not empty.
        pixels: Address of width x height pixels. Of the part's rows all may be written to; other
            rows are left as they are.
        pixel_bytes: 4, as Pillow keeps them, or 3.
        shrink: 1, 2, 4 or 8: decode a picture that many times smaller, from the low frequencies of
            each block. `size`, `box` and `pixels` count its pixels; a side is rounded up.

    Returns:
        False if the library found fault with the file: then the pixels mean nothing.

    Raises:
        NotApplicable: if Pillow's library cannot do it.
    """
    if not data.endswith(END):
        return False
    function = open_library()
    sides, edges = (ctypes.c_int * 2)(*size), (ctypes.c_int * 4)(*box)
    return not function(data, len(data), sides, edges, pixels, pixel_bytes, shrink)


@functools.cache
def open_library() -> Any:
    """Return the compiled function, bound to Pillow's library."""
    path = find_jpeg_library()
    library = load_library("region")
    trouble = library.open_library(path.encode())
    if trouble:
        raise NotApplicable(f"Pillow's JPEG library ({Path(path).name}) {TROUBLES[trouble]}")
    pointers = (ctypes.c_void_p,) * 3
    numbers = (ctypes.c_int,) * 2
    sizes = (ctypes.c_char_p, ctypes.c_ulong)
    return load_function("region", "decode_region", *sizes, *pointers, *numbers)


@functools.cache
def can_decode() -> bool:
    """Return whether parts can be decoded on this machine."""
    try:
        open_library()
    except (NotApplicable, ImportError):
        return False
    return True


def find_jpeg_library() -> str:
    """Return the path of the JPEG library that Pillow has loaded."""
    from PIL import features

    if not features.check("jpg"):
        raise NotApplicable("this Pillow cannot decode JPEG")
    try:
        lines = MAPS.read_text(errors="replace").splitlines()
    except OSError:
        raise NotApplicable("the libraries that are loaded are told by Linux only") from None
    paths = [line.split(maxsplit=5)[-1] for line in lines if "/libjpeg" in line]
    if not paths:
        raise NotApplicable("Pillow's JPEG library is not a shared one")
    return next((path for path in paths if OWN in path.lower()), paths[0])
