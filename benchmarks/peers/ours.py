"""flatout's ways to do the job: the classic loader with levers on it, and packed stores."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.peers import job
from benchmarks.peers.loaders import Batches, Classic, with_workers


def classic_tuned(folder: Path, _formats: Path) -> Batches:
    """The classic loader, unchanged, under `fast_decode` and `device_preprocess`."""
    from flatout.techniques.data.device_preprocess import send_bytes
    from flatout.techniques.data.fast_decode import decode_fast

    loader = send_bytes(decode_fast(with_workers(Classic(folder))))
    return (images for images, _ in loader)


class _Augment:
    """Crops decoded pixels; each worker has a random state of its own."""

    def __init__(self) -> None:
        self.random: Random | None = None

    def __call__(self, pixels: Any) -> torch.Tensor:
        if self.random is None:
            job.one_thread()
            self.random = Random(torch.initial_seed())
        return torch.from_numpy(np.ascontiguousarray(job.augment_pixels(pixels, self.random)))


def _decoded(content: bytes) -> Any:
    import simplejpeg

    return simplejpeg.decode_jpeg(content, "RGB")


def _packed(path: Path, decode: Any) -> Batches:
    import flatout.data

    data = flatout.data.open(path, decode=decode, transform=_Augment())
    loader = with_workers(data)
    return (flatout.data.normalised(images, job.MEAN, job.STD) for images, _ in loader)


def packed_jpeg(_folder: Path, formats: Path) -> Batches:
    """`flatout pack` with the original bytes, decoded by simplejpeg."""
    return _packed(formats / "packed", _decoded)


def packed_raw(_folder: Path, formats: Path) -> Batches:
    """`flatout pack --encode raw --short-side 256`."""
    return _packed(formats / "packed256", "view")


OURS: dict[str, Callable[[Path, Path], Batches]] = {
    "flatout, classic script": classic_tuned,
    "flatout, packed JPEG": packed_jpeg,
    "flatout, packed raw 256": packed_raw,
}
