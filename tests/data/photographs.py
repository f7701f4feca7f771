"""Small photographs, and data sets over them in the ways that people write them."""

import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset


def photograph(folder, number, size=(60, 40), kind="jpg"):
    """Write a picture of noise on a slope and return its path."""
    noise = np.random.default_rng(number).integers(0, 60, (size[1], size[0], 3))
    slope = np.linspace(0, 180, size[0])[None, :, None]
    path = folder / f"{number:04}.{kind}"
    Image.fromarray((noise + slope).astype(np.uint8)).save(path)
    return path


def tensor_of(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


class Photographs(Dataset):
    """The same picture each time; `flips` turns it round half of the time."""

    def __init__(self, paths, *, flips=False):
        self.paths = list(paths)
        self.flips = flips

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        with self.paths[index].open("rb") as file:
            image = Image.open(file).convert("RGB")
        if self.flips and random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return tensor_of(image), index % 3


class Crops(Photographs):
    """A random part of a photograph of 90 x 70, cut out and resized, or resized at once."""

    def __getitem__(self, index):
        image = Image.open(self.paths[index]).convert("RGB")
        left, top = random.randint(0, 40), random.randint(0, 30)
        box = (left, top, random.randint(left + 5, 90), random.randint(top + 5, 70))
        if random.random() < 0.5:
            return tensor_of(image.crop(box).resize((32, 24))), index
        box = (left + random.random(), top + random.random(), *box[2:])
        return tensor_of(image.resize((32, 24), random.randint(1, 5), box)), index


def seen(loader):
    """Return the batches of an epoch, drawn from the same random streams each time."""
    random.seed(0)
    torch.manual_seed(0)
    return [[x.tolist() for x in batch] for batch in loader]
