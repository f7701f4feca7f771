"""The last lines of data sets, in the ways that people turn a picture into a tensor."""

import random

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
STD = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def numpy_arithmetic(image):
    pixels = (np.asarray(image, dtype=np.float32) / 255 - MEAN) / STD
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def torch_arithmetic(image):
    x = torch.from_numpy(np.asarray(image).copy()).permute(2, 0, 1).float().div(255)
    return (x - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


def in_place_and_cropped(image):
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().to(torch.float32)
    x /= 255
    x.sub_(torch.tensor(MEAN).view(3, 1, 1)).div_(torch.tensor(STD).view(3, 1, 1))
    return x.flip(-1)[:, 3:37]


def numpy_in_double(image):
    return torch.tensor((np.array(image) / 255.0).transpose(2, 0, 1), dtype=torch.float32)


def an_array(image):
    return np.asarray(image).astype("float32").transpose((2, 0, 1)) / 127.5 - 1


def a_product(image):
    return torch.as_tensor(np.asarray(image).transpose(2, 0, 1) * (1 / 255.0), dtype=torch.float)


def grey(image):
    return torch.from_numpy(np.asarray(image.resize((80, 60)).convert("L"), np.float32))[None] / 255


def half(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).to(torch.bfloat16) / 255


def mirrored_in_numpy(image):
    pixels = np.asarray(image, dtype=np.float32)[:, ::-1] / 255
    pixels -= 0.5
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


TAILS = (
    numpy_arithmetic,
    torch_arithmetic,
    in_place_and_cropped,
    numpy_in_double,
    an_array,
    a_product,
    grey,
    half,
    mirrored_in_numpy,
)


def standardised(image):
    """Not a function of each byte alone."""
    x = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
    return (x - x.mean()) / x.std()


def noisy_pictures():
    """Return a few pictures of which no two pixels are alike."""
    noise = np.random.default_rng(0)
    made = [noise.integers(0, 256, (50, 60, 3), dtype=np.uint8) for _ in range(6)]
    return [Image.fromarray(pixels) for pixels in made]


class Pictures(Dataset):
    """Pictures, flipped at random, with a tail of one's choice."""

    def __init__(self, pictures, tail):
        self.pictures = pictures
        self.tail = tail

    def __len__(self):
        return len(self.pictures)

    def __getitem__(self, index):
        image = self.pictures[index]
        if random.random() < 0.5:
            image = image.transpose(0)
        return self.tail(image), index
