"""Images in the packed format: a tag byte, then the file's bytes or pixels.

`ORIGINAL` and `JPEG` are followed by the bytes of an image file; `RAW` by height, width (32 bits
each), channels (8 bits) and the uint8 pixels, row by row; `ZSTD` by the same with the pixels
compressed; `QOI` by a QOI image. Pixels are kept in the image's own mode, grey, RGB or RGBA. An
image of another mode (palette, CMYK, 16 bits, ...) and one that its EXIF data turns stays in its
original bytes under the lossless encodings: so nothing about it is lost.
"""

import importlib
import importlib.util
import io
import math
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from flatout.data.format import BadSample, Encoding
from flatout.records.errors import UserError

if TYPE_CHECKING:
    from PIL import Image

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
ORIGINAL, RAW, JPEG, QOI, ZSTD = range(5)
SIZE = struct.Struct("<IIB")
"""Height, width, channels."""
QOI_SIZE = struct.Struct(">4xIIB")
"""Width, height, channels at the start of a QOI image."""
QOI_RUN = 62
"""The most pixels that one byte of it stands for."""
MAX_PIXEL_BYTES = 1 << 30
"""Of one image; Pillow takes images of more than 0.18 thousand million pixels for an attack."""
CHANNELS = {"L": 1, "RGB": 3, "RGBA": 4}
ORIENTATION = 0x0112
"""The EXIF tag that says which side is up; 1 is as stored."""
SUBSAMPLING = "4:2:0"
TAIL_BYTES = 4096
"""How far from its end a whole JPEG has its end marker; cameras append a little to some files."""
ZSTD_LEVEL = 3
"""The library's own; 2.7 times as fast to decode as a JPEG, at 6 times the size."""
SUFFIXES = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif")
"""What is taken for an image by its name: torchvision's list, and GIF."""
NEEDS = {"raw": ("PIL",), "jpeg": ("PIL",), "qoi": ("PIL", "qoi"), "zstd": ("PIL", "zstandard")}
"""Modules an encoding needs."""


def is_pil(value: Any) -> bool:
    """Return whether a value is a Pillow image, importing nothing."""
    return any(f"{k.__module__}.{k.__name__}" == "PIL.Image.Image" for k in type(value).__mro__)


def check_encoding(encoding: Encoding) -> None:
    """Make sure that what an encoding needs is installed."""
    missing = [name for name in NEEDS.get(encoding.kind, ()) if not importlib.util.find_spec(name)]
    if missing:
        raise UserError(
            f"the encoding {encoding.kind} needs {' and '.join(missing)}: "
            "pip install 'flatout[pack]'"
        )


def from_source(value: Any) -> bytes:
    """Return the payload of an image as the source has it: a file's bytes, or a Pillow image."""
    if is_pil(value):
        if value.mode not in CHANNELS:
            raise BadSample(f"the image's mode is {value.mode}; convert it to L, RGB or RGBA")
        with _damage_named():  # it may not have been read from its file yet
            return _raw(np.asarray(value))
    check_file(value)
    return bytes((ORIGINAL,)) + bytes(value)


def encode(payload: bytes, encoding: Encoding) -> bytes:
    """Return the payload in another encoding.

    Raises:
        BadSample: if Pillow cannot decode the image, or the encoding cannot hold it.
    """
    if encoding.kind in ("original", "tokens"):
        return payload
    with _damage_named():
        return _encoded(payload, encoding)


def _encoded(payload: bytes, encoding: Encoding) -> bytes:
    image = open_image(memoryview(payload))
    if encoding.is_lossless:
        pixels = _lossless_pixels(image)
        return payload if pixels is None else _coded(pixels, encoding.kind)
    small = _smaller(_rgb(image), encoding.short_side)
    if encoding.kind == "jpeg":
        stream = io.BytesIO()
        small.save(stream, "JPEG", quality=encoding.quality, subsampling=SUBSAMPLING)
        return bytes((JPEG,)) + stream.getvalue()
    return _coded(np.asarray(small), encoding.kind)


def open_image(payload: memoryview) -> "Image.Image":
    """Return the image as Pillow gives it, in its own mode."""
    from PIL import Image, UnidentifiedImageError

    if payload[0] in (ORIGINAL, JPEG):
        with _damage_named():
            try:
                return Image.open(io.BytesIO(payload[1:]))
            except UnidentifiedImageError:
                start = bytes(payload[1:9])
                raise BadSample(f"not an image (it starts with {start!r})") from None
    found = pixels(payload)
    return Image.fromarray(found[:, :, 0] if found.shape[2] == 1 else found)


def pixels(payload: memoryview) -> Pixels:
    """Return the pixels as (height, width, channels); of a file as RGB."""
    try:
        return _pixels(payload)
    except (BadSample, UserError):
        raise
    except (IndexError, ValueError, struct.error) as error:
        raise BadSample(f"the image is damaged ({error})") from None


def _pixels(payload: memoryview) -> Pixels:
    tag, data = payload[0], payload[1:]
    if tag == RAW:
        return np.frombuffer(data[SIZE.size :], np.uint8).reshape(SIZE.unpack_from(data))
    if tag == ZSTD:
        shape, packed = SIZE.unpack_from(data), data[SIZE.size :]
        _check_size(math.prod(shape), _library("zstandard").frame_content_size(packed))
        raw = _library("zstandard").ZstdDecompressor().decompress(packed)
        return np.frombuffer(raw, np.uint8).reshape(shape)
    if tag == QOI:
        width, height, channels = QOI_SIZE.unpack_from(data)
        _check_size(width * height * channels, min(QOI_RUN * len(data), width * height) * channels)
        found: Pixels = _library("qoi").decode(bytes(data))
        return found
    return np.asarray(_rgb(open_image(payload)))


def _check_size(told: int, held: int) -> None:
    """Refuse to decode what would take more memory than the size that is told, or than any image.

    Args:
        told: bytes of the pixels by the size in front of them.
        held: bytes that the compressed data can give.
    """
    if told > MAX_PIXEL_BYTES or told != held:
        raise BadSample(f"the image is damaged or too large: it tells of {told} bytes of pixels")


def rgb_pixels(payload: memoryview) -> Pixels:
    """Return the pixels as RGB, whatever mode the image has."""
    found = pixels(payload)
    if found.shape[2] == 3:
        return found
    return np.asarray(_rgb(open_image(payload)))


def source_bytes(payload: memoryview) -> Any:
    """Return the file's bytes, or the pixels where there is no file."""
    file = file_bytes(payload)
    return pixels(payload) if file is None else file


def file_bytes(payload: memoryview) -> bytes | None:
    """Return the file's bytes; None where pixels are stored."""
    return bytes(payload[1:]) if payload[0] in (ORIGINAL, JPEG) else None


def raw_shape(payload: bytes | memoryview) -> tuple[int, ...] | None:
    """Return height, width and channels of raw pixels, None for any other payload."""
    return SIZE.unpack_from(payload, 1) if payload[0] == RAW else None


def check_file(data: bytes) -> None:
    """Make sure that the bytes are a whole image file.

    Signature and end are looked at, which is quick; where they are not as expected, Pillow
    decodes the image. Damage in the middle of a file that still decodes is not seen.
    """
    if not data:
        raise BadSample("the file is empty")
    if _looks_whole(data):
        return
    _loaded(open_image(memoryview(b"\0" + data)))


def _looks_whole(data: bytes) -> bool:
    if data.startswith(b"\xff\xd8\xff"):
        if len(data) > TAIL_BYTES:
            return b"\xff\xd9" in data[-TAIL_BYTES:]
        return data.rstrip(b"\0").endswith(b"\xff\xd9")
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return b"IEND" in data[-16:]
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return int.from_bytes(data[4:8], "little") + 8 <= len(data)
    return False


def _lossless_pixels(image: "Image.Image") -> Pixels | None:
    """Return the pixels where they are all there is to the image, else None."""
    if image.mode not in CHANNELS or getattr(image, "n_frames", 1) != 1:
        return None
    if image.getexif().get(ORIENTATION, 1) != 1 or "transparency" in image.info:
        return None
    return np.asarray(_loaded(image))


def _coded(found: Pixels, kind: str) -> bytes:
    if kind == "qoi" and found.ndim == 3:  # QOI knows no grey
        return bytes((QOI,)) + bytes(_library("qoi").encode(np.ascontiguousarray(found)))
    if kind == "zstd":
        head = bytes((ZSTD,)) + SIZE.pack(*_size(found))
        packed = _library("zstandard").ZstdCompressor(level=ZSTD_LEVEL).compress(found.tobytes())
        return head + bytes(packed)
    return _raw(found)


def _raw(found: Pixels) -> bytes:
    return bytes((RAW,)) + SIZE.pack(*_size(found)) + found.tobytes()


def _size(found: Pixels) -> tuple[int, int, int]:
    return found.shape[0], found.shape[1], found.shape[2] if found.ndim == 3 else 1


def _rgb(image: "Image.Image") -> "Image.Image":
    return _loaded(image).convert("RGB")


def _loaded(image: "Image.Image") -> "Image.Image":
    with _damage_named():
        image.load()
    return image


@contextmanager
def _damage_named() -> Iterator[None]:
    """Turn whatever Pillow raises about an image into a bad sample.

    Its decoders raise nearly every class of exception; that of an image too large to be harmless
    is not even an `OSError`. One such file must not end a pack that leaves bad samples out.
    """
    from PIL import Image

    try:
        yield
    except (BadSample, UserError):
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError) as error:
        raise BadSample(f"the image is too large to be decoded ({error})") from None
    except Exception as error:  # noqa: BLE001  see above
        raise BadSample(f"the image is damaged or cut off ({error})") from None


def _smaller(image: "Image.Image", short_side: int) -> "Image.Image":
    """Return the image with its short side at most that long; images are never enlarged."""
    now = min(image.size)
    if not short_side or now <= short_side:
        return image
    width, height = (max(1, round(side * short_side / now)) for side in image.size)
    from PIL import Image

    return image.resize((width, height), Image.Resampling.BICUBIC)


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(f"this store needs {name}: pip install 'flatout[pack]'") from None
