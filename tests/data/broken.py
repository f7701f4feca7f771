"""Photographs of which some are cut short, some are no pictures, and some went away."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset

from tests.data.photographs import photograph

CUT, TEXT, GONE = 3, 9, 14
BAD = (CUT, TEXT, GONE)


def broken_photographs(folder, count=20, size=(60, 40)):
    """Write photographs, break three, and return the paths of all."""
    paths = [photograph(folder, number, size) for number in range(count)]
    with paths[CUT].open("r+b") as file:
        file.truncate(paths[CUT].stat().st_size // 2)
    paths[TEXT].write_text("no picture")
    paths[GONE].unlink()
    return [str(path) for path in paths]


class Opened(Dataset):
    """Pictures as most people read them; the label is the number."""

    def __init__(self, paths):
        self.paths = paths

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with Image.open(self.paths[index]) as picture:
            image = picture.convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index


class FromFiles(Opened):
    """Pictures from files that the data set opens itself, as torchvision's loader does."""

    def __getitem__(self, index):
        path = Path(self.paths[index])
        with path.open("rb") as file:
            image = Image.open(file).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index


class FromBytes(Opened):
    """Pictures from bytes, decoded by Pillow."""

    def __getitem__(self, index):
        path = self.paths[index]
        image = Image.open(io.BytesIO(Path(path).read_bytes())).convert("RGB")
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), index


class BySimplejpeg(Opened):
    """Pictures that simplejpeg decodes."""

    def __getitem__(self, index):
        import simplejpeg

        pixels = simplejpeg.decode_jpeg(Path(self.paths[index]).read_bytes())
        return torch.from_numpy(pixels).permute(2, 0, 1), index


class InBatches(Opened):
    """Pictures of which whole batches are asked for."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class OneByOne(IterableDataset):
    """A stream that can go on after an error: its state is a number."""

    def __init__(self, paths):
        self.pictures = Opened(paths)

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        return map(self.pictures.__getitem__, range(first, len(self.pictures), step))


class Generated(OneByOne):
    """A stream that an error ends."""

    def __iter__(self):
        yield from (self.pictures[index] for index in range(len(self.pictures)))
