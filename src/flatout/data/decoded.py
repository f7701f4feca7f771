"""Keep what Pillow decoded: a photograph that is loaded again is copied instead of decoded.

For data sets that change their samples at random: what lies before the randomness, the decoding
of a file, is the same each time. `Image.open` still reads the header, so that size, mode, format
and EXIF are what they always were; only the pixels come from the store.
"""

import contextlib
import functools
import hashlib
import os
import pickle
from collections.abc import Callable
from typing import Any

from flatout.data.store import Store

MODES = {"L": 1, "RGB": 3, "CMYK": 4, "RGBA": 4}
"""Modes that are kept, with their bytes a pixel: images whose pixels are all there is of them."""
FORMATS = frozenset({"JPEG", "MPO", "PNG", "BMP", "PPM"})
"""Formats that are kept. Not TIFF: Pillow turns such a picture while it loads it and takes the
orientation out of its tags, and what comes here of TIFF is not compressed: nothing is saved."""


_ACTIVE: list[Store] = []
"""The store of this process, the latest last."""


def is_keeping() -> bool:
    """Tell whether this process keeps what it decodes."""
    return bool(_ACTIVE)


def keep_decoded(store: Store) -> Callable[[], None]:
    """Let Pillow's loading look into the store first; return what undoes that."""
    from PIL import ImageFile

    kind: Any = ImageFile.ImageFile
    original = kind.load
    _ACTIVE.append(store)
    kind.load = through_store(original)

    def undo() -> None:
        _ACTIVE.remove(store)
        kind.load = original

    return undo


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
    """Return a number for the file as it lies there now and the way it is decoded."""
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
