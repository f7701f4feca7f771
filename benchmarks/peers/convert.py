"""Write the photographs in the formats of the peers; formats whose library is missing are left out.

python -m benchmarks.peers.convert PHOTOGRAPHS FORMATS
"""

import importlib.util
import io
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers import job, loaders

SHARD = 1000
"""Photographs in a tar file."""


def to_webdataset(folder: Path, formats: Path) -> None:
    """Write tar files; WebDataset need not be installed for that."""
    out = formats / "webdataset"
    out.mkdir(parents=True, exist_ok=True)
    paths = job.files(folder)
    classes = job.labels(paths)
    order = np.random.default_rng(0).permutation(len(paths))
    for first in range(0, len(order), SHARD):
        with tarfile.open(out / f"{first:06d}.tar", "w") as tar:
            for number in order[first : first + SHARD].tolist():
                _add(tar, f"{number:06d}.jpg", paths[number].read_bytes())
                _add(tar, f"{number:06d}.cls", str(classes[number]).encode())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def _sample(item: tuple[str, int]) -> dict[str, Any]:
    path, label = item
    return {"image": Path(path).read_bytes(), "label": label}


def to_litdata(folder: Path, formats: Path) -> None:
    """Write LitData's chunks."""
    from litdata import optimize

    paths = job.files(folder)
    items = list(zip(map(str, paths), job.labels(paths), strict=True))
    optimize(
        fn=_sample,
        inputs=items,
        output_dir=str(formats / "litdata"),
        num_workers=2,
        chunk_bytes="16MB",
    )


def to_mosaicml(folder: Path, formats: Path) -> None:
    """Write MosaicML Streaming's shards."""
    loaders.torchvision_without_operators()
    from streaming import MDSWriter

    paths = job.files(folder)
    columns = {"image": "bytes", "label": "int"}
    with MDSWriter(out=str(formats / "mosaicml"), columns=columns) as writer:
        for path, label in zip(paths, job.labels(paths), strict=True):
            writer.write({"image": path.read_bytes(), "label": label})


class _Images:
    """FFCV's source of images: Pillow images and labels."""

    def __init__(self, folder: Path, short_side: int | None) -> None:
        self.paths, self.short_side = job.files(folder), short_side
        self.labels = job.labels(self.paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        from PIL import Image

        image = Image.open(self.paths[index]).convert("RGB")
        if self.short_side:
            scale = self.short_side / min(image.size)
            image = image.resize(tuple(round(side * scale) for side in image.size))
        return image, self.labels[index]


def to_ffcv(folder: Path, formats: Path) -> None:
    """Write two beton files: JPEG of quality 90, and pixels of short side 256."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.writer import DatasetWriter

    jpeg = RGBImageField(write_mode="jpg", jpeg_quality=90)
    raw = RGBImageField(write_mode="raw")
    for name, field, side in (("jpeg", jpeg, None), ("raw", raw, job.SHORT_SIDE)):
        path = formats / f"{name}.beton"
        if not path.exists():
            fields = {"image": field, "label": IntField()}
            DatasetWriter(str(path), fields, num_workers=2).from_indexed_dataset(
                _Images(folder, side)
            )


def main() -> None:
    """Write everything there is a library for."""
    folder, formats = map(Path, sys.argv[1:])
    formats.mkdir(parents=True, exist_ok=True)
    to_webdataset(folder, formats)
    converters = {"litdata": to_litdata, "streaming": to_mosaicml, "ffcv": to_ffcv}
    for name, convert in converters.items():
        if importlib.util.find_spec(name) is None:
            print(f"{name} is not installed")
            continue
        try:
            convert(folder, formats)
        except Exception as error:  # noqa: BLE001  one library that fails says so; the others go on
            print(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
