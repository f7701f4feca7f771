"""Small sources of every kind, and packs of them."""

import hashlib
import io
import json
import tarfile

import numpy as np
from PIL import Image
from torch.utils.data import Dataset

from flatout.data.format import Encoding
from flatout.data.sources import open_source
from flatout.data.writer import PackOptions, pack

SIZES = ((48, 36), (36, 48), (48, 36))


def photograph(number, mode="RGB", size=None):
    """Return an image with some structure; a function of the number alone."""
    random = np.random.default_rng(number)
    small = Image.fromarray(random.integers(0, 256, (4, 4, 3), np.uint8).astype(np.uint8))
    return small.resize(size or SIZES[number % len(SIZES)], Image.Resampling.BICUBIC).convert(mode)


def file_bytes(number, suffix="jpeg", **options):
    stream = io.BytesIO()
    photograph(number, **options).save(stream, suffix)
    return stream.getvalue()


def image_folder(root, count=12, classes=("cat", "dog", "owl"), suffix="jpeg", **options):
    """Write that many images, one class after the other."""
    for number in range(count):
        folder = root / classes[number * len(classes) // count]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:04d}.{suffix}").write_bytes(file_bytes(number, suffix, **options))
    return root


def tar(path, members):
    """Write a tar of name -> bytes, or of whole `TarInfo` records."""
    with tarfile.open(path, "w") as archive:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def packed(target, folder, *, encoding=None, tell=None, **options):
    """Pack a source and return the header."""
    wanted = PackOptions(encoding=encoding or Encoding(), **options)
    source = open_source(str(target), work=folder / ".pack", on_bad=wanted.on_bad)
    return pack(source, folder, wanted, tell or (lambda _progress: None))


def digest(folder):
    """Return a hash of every file of a store."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def skipped_in(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


class Items(Dataset):
    """A data set of items that are given."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]
