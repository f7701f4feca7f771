"""The job that every loader does: crop a photograph at random to 224, flip it, normalise it.

What is delivered are batches of 64 in float32, channels first, in the process that would train.
Loaders that hand out bytes have them normalised there, and that is counted.
"""

import io
import math
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

BATCH = 64
SIDE = 224
SHORT_SIDE = 256
"""Of photographs that are stored as pixels."""
SCALE, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Shares of the area and ratios of the sides, as RandomResizedCrop's defaults."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TRIES = 10
WORKERS = 2

Pixels = npt.NDArray[np.uint8]


def files(folder: Path) -> list[Path]:
    """Return the photographs of a folder, class by class."""
    return sorted(folder.rglob("*.jpg"))


def labels(paths: list[Path]) -> list[int]:
    """Return the number of each photograph's class."""
    names = sorted({path.parent.name for path in paths})
    return [names.index(path.parent.name) for path in paths]


def crop_box(random: Random, width: int, height: int) -> tuple[int, int, int, int]:
    """Return left, top, width and height of a random crop, drawn as torchvision draws it."""
    low, high = map(math.log, RATIO)
    for _ in range(TRIES):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, width - w), random.randint(0, height - h), w, h
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def augment_file(content: bytes, random: Random) -> Pixels:
    """Decode with Pillow, crop, resize and flip: what most scripts do."""
    from PIL import Image

    return augment_image(Image.open(io.BytesIO(content)).convert("RGB"), random)


def augment_image(image: Any, random: Random) -> Pixels:
    """Crop, resize and flip an image of Pillow's."""
    from PIL import Image

    left, top, w, h = crop_box(random, *image.size)
    box = (left, top, left + w, top + h)
    resized = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(resized)
    return pixels[:, ::-1] if random.random() < 0.5 else pixels


def augment_pixels(pixels: Pixels, random: Random) -> Pixels:
    """Crop, resize and flip pixels that are decoded already, with OpenCV."""
    import cv2

    left, top, w, h = crop_box(random, pixels.shape[1], pixels.shape[0])
    shrinks = w > SIDE and h > SIDE
    how = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    resized = cv2.resize(pixels[top : top + h, left : left + w], (SIDE, SIDE), interpolation=how)
    return resized[:, ::-1] if random.random() < 0.5 else resized


def normalised(pixels: Pixels) -> torch.Tensor:
    """Return one sample as the classic pipeline does: ToTensor, then Normalize."""
    tensor = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float().div(255)
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return tensor.sub_(mean).div_(std).contiguous()


def normalised_batch(batch: torch.Tensor) -> torch.Tensor:
    """Return a batch of bytes, channels last, in float32, channels first."""
    mean = 255 * torch.tensor(MEAN).view(1, 3, 1, 1)
    std = 255 * torch.tensor(STD).view(1, 3, 1, 1)
    return batch.permute(0, 3, 1, 2).contiguous().float().sub_(mean).div_(std)


def one_thread() -> None:
    """Keep the libraries' own threads out of a worker."""
    torch.set_num_threads(1)
    try:
        import cv2
    except ImportError:
        return
    cv2.setNumThreads(0)
