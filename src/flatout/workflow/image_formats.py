"""`flatout pack --formats`: what one of the user's own images costs in each format.

Images spread over the source are encoded in memory, and decoded to RGB in rounds, one format after
the other, so that a change of the machine's speed meets all formats alike. Times are CPU time of
this thread: other work on the machine does not count, and neither does waiting for a disk.
"""

import importlib.util
import io
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data import pictures
from flatout.data.caching import free_memory_bytes
from flatout.data.format import BadSample, Encoding
from flatout.data.sources import open_source
from flatout.data.sources.source import Source
from flatout.hardware.limits import usable_cores
from flatout.records.errors import UserError
from flatout.records.json_records import to_plain

SCHEMA = "flatout.formats/1"
IMAGES = 48
"""Read at most; spread evenly over the source."""
ROUNDS = 5
"""Each decodes every image in every format; the median round counts."""
MAX_PIXELS = 256 << 20
"""Of all images together: their pixels and encodings stay in memory."""
MAX_SIDE = 16_383
"""WebP holds no longer one, and every format is to have the same images."""
QUALITY = 90
"""Of the lossy formats, as `flatout pack --encode jpeg` has it."""
PACKED = ("jpeg", "qoi", "zstd", "raw")
"""Formats that `flatout pack --encode` writes."""
SAVED: dict[str, dict[str, Any]] = {
    "png": {"format": "PNG"},
    "webp": {"format": "WEBP", "quality": QUALITY},
    "webp lossless": {"format": "WEBP", "lossless": True},
}
"""Formats that a data set can be converted to, and how Pillow writes them."""
ORIGINAL = "as it is"


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatCost:
    """What the images cost in one format, on average over the images."""

    name: str
    bytes_per_image: float
    decode_ms: float
    """CPU time of one image to RGB pixels: median over rounds."""
    decode_ms_range: tuple[float, float]
    """Fastest and slowest round."""
    difference: float
    """Mean absolute difference of the pixels, in levels of 256; 0 is lossless."""
    total_bytes: float
    """Of all images of the source in this format."""
    images_per_s: float
    """What all usable cores decode, and no more than storage gives where the images do not fit
    into free memory."""
    cores_needed: float | None
    """To decode what the training takes; None where the user did not say it."""
    images_per_s_per_core: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatComparison:
    """The formats, the source's own first."""

    source: str
    images: int
    read_bytes_per_s: float | None
    """Of the source's files, dropped from the page cache first; None where it has none."""
    free_memory_bytes: int
    """What fits into it is read from storage once, then from the page cache."""
    usable_cores: int
    costs: tuple[FormatCost, ...]
    not_installed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        return {"schema": SCHEMA, **to_plain(self)}


def compare_formats(target: str, images_per_s: float | None = None) -> FormatComparison:
    """Return what the images of a source cost in each format that can be decoded here.

    What the training takes, in images a second, gives the cores that each format needs.

    Raises:
        UserError: if the source holds no images or Pillow is not installed.
    """
    pictures.check_encoding(Encoding(kind="raw"))
    with tempfile.TemporaryDirectory() as work:
        source = open_source(target, work=Path(work), on_bad="skip")
        originals = _images(source)
        read_rate = _read_rate(_files(source, target))
    encoded, missing = _encoded(originals)
    rounds = [
        {name: _decode_ms(payloads) for name, payloads in encoded.items()} for _ in range(ROUNDS)
    ]
    wanted = [pictures.rgb_pixels(memoryview(payload)) for payload in originals]
    free_bytes, cores = free_memory_bytes(), usable_cores()
    costs = []
    for name, payloads in encoded.items():
        rounds_ms = [found[name] for found in rounds]
        size = statistics.fmean(map(len, payloads))
        decode_ms = statistics.median(rounds_ms)
        per_s = cores * 1000 / decode_ms
        if read_rate and size * len(source) > free_bytes:
            per_s = min(per_s, read_rate / size)
        cost = FormatCost(
            name=name,
            bytes_per_image=size,
            decode_ms=decode_ms,
            decode_ms_range=(min(rounds_ms), max(rounds_ms)),
            difference=statistics.fmean(map(_difference, payloads, wanted)),
            total_bytes=size * len(source),
            images_per_s=per_s,
            images_per_s_per_core=1000 / decode_ms,
            cores_needed=images_per_s * decode_ms / 1000 if images_per_s else None,
        )
        costs.append(cost)
    return FormatComparison(
        source=target,
        images=len(originals),
        read_bytes_per_s=read_rate,
        free_memory_bytes=free_bytes,
        usable_cores=cores,
        costs=tuple(costs),
        not_installed=missing,
    )


def _images(source: Source) -> list[bytes]:
    """Return images of the source, spread evenly, as payloads of the packed format."""
    at = next((n for n, f in enumerate(source.contents.fields) if f.kind == "image"), None)
    if at is None:
        raise UserError("the source holds no images; --formats compares formats of images")
    found: list[bytes] = []
    pixels = 0
    numbers = _spread(source)
    for number in numbers:
        try:
            payload = pictures.from_source(source.read(number)[at])
            decoded = pictures.rgb_pixels(memoryview(payload))
        except BadSample:
            continue
        if max(decoded.shape) > MAX_SIDE:
            continue
        found.append(payload)
        pixels += decoded.size
        if pixels > MAX_PIXELS:
            break
    if not found:
        raise UserError(
            f"none of {len(numbers)} images of the source can be decoded, with sides of at most "
            f"{MAX_SIDE} pixels"
        )
    return found


def _spread(source: Source) -> list[int]:
    """Return numbers of samples, spread evenly over the source."""
    return sorted({*np.linspace(0, len(source) - 1, IMAGES, dtype=int).tolist()})


def _encoded(originals: Sequence[bytes]) -> tuple[dict[str, list[bytes]], tuple[str, ...]]:
    """Return the images in each format, and the formats whose library is missing."""
    from PIL import features

    found: dict[str, list[bytes]] = {ORIGINAL: list(originals)}
    missing: list[str] = []
    for kind in PACKED:
        if not all(map(importlib.util.find_spec, pictures.NEEDS[kind])):
            missing.append(kind)
            continue
        encoding = Encoding(kind=kind, quality=QUALITY)
        found[kind] = [pictures.encode(payload, encoding) for payload in originals]
    for name, options in SAVED.items():
        if options["format"] == "WEBP" and not features.check("webp"):
            missing.append(name)
        else:
            found[name] = [_saved(payload, options) for payload in originals]
    return found, tuple(missing)


def _saved(payload: bytes, options: dict[str, Any]) -> bytes:
    stream = io.BytesIO()
    pictures.open_image(memoryview(payload)).convert("RGB").save(stream, **options)
    return bytes((pictures.ORIGINAL,)) + stream.getvalue()


def _decode_ms(payloads: Sequence[bytes]) -> float:
    """Return the milliseconds of CPU time that an image takes until its pixels are an array."""
    began_ns = time.thread_time_ns()
    for payload in payloads:
        np.array(pictures.rgb_pixels(memoryview(payload)))  # a copy: raw pixels are a view
    return (time.thread_time_ns() - began_ns) / 1e6 / len(payloads)


def _difference(payload: bytes, wanted: Any) -> float:
    found = pictures.rgb_pixels(memoryview(payload))
    return float(np.abs(found.astype(np.int16) - wanted).mean())


def _files(source: Source, target: str) -> list[Path]:
    """Return files of a folder of images, which can be read again; none for other sources."""
    root = Path(target).expanduser()
    paths = [root / source.name(number) for number in _spread(source)] if root.is_dir() else []
    return [path for path in paths if path.is_file()]


def _read_rate(files: Sequence[Path]) -> float | None:
    """Return the bytes a second at which the files come from storage, one after the other."""
    if not files or not hasattr(os, "posix_fadvise"):
        return None
    for path in files:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    began_s = time.perf_counter()
    total = sum(len(path.read_bytes()) for path in files)
    spent_s = time.perf_counter() - began_s
    return total / spent_s if total and spent_s > 0 else None
