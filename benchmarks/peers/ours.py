"""flatout's ways to do the job: the classic loader with techniques on it, and packed stores."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import job
from benchmarks.peers.loaders import Batches, Classic, with_workers


def classic_tuned(folder: Path, _formats: Path) -> Batches:
    """The classic loader, unchanged: `region_decode`, `fast_resize` and `device_preprocess`."""
    from flatout.techniques.data.device_preprocess import send_bytes
    from flatout.techniques.data.fast_resize import resize_fast
    from flatout.techniques.data.region_decode import decode_regions

    loader = send_bytes(resize_fast(decode_regions(with_workers(Classic(folder)))))
    return (images for images, _ in loader)


def _endless(samples: int) -> Iterator[Sequence[int]]:
    import flatout.data

    options = flatout.data.OrderOptions(drop_last=True)
    order = flatout.data.GlobalOrder(samples, job.BATCH, options)
    while True:
        yield from order


def _threads(source: Any, *, is_normalised: bool, is_resized: bool = True) -> Batches:
    """Return the job's batches, made by threads of this process."""
    import flatout.data

    crops = flatout.data.Crops(
        side=job.SIDE,
        scale=job.SCALE if is_resized else None,
        ratio=job.RATIO,
        mean=job.MEAN if is_normalised else (),
        std=job.STD if is_normalised else (),
    )
    data = flatout.data.cropped(source, crops, seed=0)
    loader = flatout.data.BatchThreads(data, _endless(len(data)), threads=job.WORKERS)
    return (images for images, _ in loader)


def packed_jpeg(_folder: Path, formats: Path) -> Batches:
    """`flatout pack` with the original bytes, of which the crops are decoded."""
    import flatout.data

    return _threads(flatout.data.open(formats / "packed"), is_normalised=True)


def packed_raw(_folder: Path, formats: Path) -> Batches:
    """`flatout pack --encode raw --short-side 256`."""
    import flatout.data

    return _threads(flatout.data.open(formats / "packed256"), is_normalised=True)


def packed_raw_bytes(_folder: Path, formats: Path) -> Batches:
    """The same, handed out as bytes: normalising them is left to the step, and not counted."""
    import flatout.data

    return _threads(flatout.data.open(formats / "packed256"), is_normalised=False)


def kept(_folder: Path, formats: Path) -> Batches:
    """Pixels of 256 x 256 kept in memory: windows of 224, mirrored and normalised; no resizing."""
    return _kept(formats, is_normalised=True)


def kept_bytes(_folder: Path, formats: Path) -> Batches:
    """The same, handed out as bytes: normalising them is left to the step, and not counted."""
    return _kept(formats, is_normalised=False)


def _kept(formats: Path, *, is_normalised: bool) -> Batches:
    import flatout.data

    data = flatout.data.open(formats / "packed256")
    pictures = flatout.data.load_pictures(data, side=job.SHORT_SIDE)
    return _threads(pictures, is_normalised=is_normalised, is_resized=False)


CLASSIC, PACKED_JPEG, PACKED_RAW = (
    "flatout, classic script",
    "flatout, packed JPEG",
    "flatout, packed raw 256",
)
PACKED_BYTES = "flatout, packed raw 256, bytes"
KEPT, KEPT_BYTES = "flatout, kept pixels", "flatout, kept pixels, bytes"
OURS: dict[str, Callable[[Path, Path], Batches]] = {
    CLASSIC: classic_tuned,
    PACKED_JPEG: packed_jpeg,
    PACKED_RAW: packed_raw,
    PACKED_BYTES: packed_raw_bytes,
    KEPT: kept,
    KEPT_BYTES: kept_bytes,
}
AS_BYTES = (PACKED_BYTES, KEPT_BYTES)
"""What hands out uint8, channels last."""
