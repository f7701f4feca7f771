"""Whole batches of random crops, from a packed store or from memory.

A crop is resized by torch's antialiased bilinear kernel, which gives Pillow's pixels up to
rounding, straight from where the pixels lie, or from a JPEG of which only the crop was decoded;
mirrored and normalised while they are still in the processor's cache.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn import functional
from torch.utils.data import Dataset

from flatout.data import values
from flatout.data.random_crops import (
    FLIP,
    HEIGHT,
    LEFT,
    TOP,
    WIDTH,
    Crops,
    Numbers,
    Undecoded,
    boxes,
    scale_and_shift,
    uniforms,
)
from flatout.data.reader import Gathered, PackedDataset, empty_batch
from flatout.data.resident_pictures import ResidentPictures, StoredPictures, image_place
from flatout.kernels.windows import MOST_SIDE, RowWriter, can_cut
from flatout.records.errors import UserError

PART = 8
"""Samples whose pixels are held at a time: boxes are drawn for all of them at once, and decoded
photographs of this many stay a few megabytes."""
CHANNELS = 3
KEY_BITS = 62
Pictures: TypeAlias = StoredPictures | ResidentPictures
"""Where pictures come from: a packed store, or memory."""


class Cropped(Dataset[Any]):
    """Random crops of pictures, for a loader of batches.

    Give a `DataLoader` `collate_fn=flatout.data.collate`, or use `flatout.data.BatchThreads`.
    """

    def __init__(self, pictures: Pictures, crops: Crops, seed: int | None = None) -> None:
        self.pictures, self.crops, self.seed = pictures, crops, seed
        self.image = image_place(pictures.header)
        self._names = tuple(field.name for field in pictures.header.fields)

    def __len__(self) -> int:
        return len(self.pictures)

    def __getitem__(self, index: int) -> Any:
        columns = [column[0] for column in self.__getitems__([index]).columns]
        found = [
            column if place == self.image else column.item() if not column.dim() else column
            for place, column in enumerate(columns)
        ]
        return values.build(self.pictures.header.structure, self._names, found)

    def __getitems__(self, indices: Sequence[int]) -> Gathered:
        return self.task(indices)()

    def task(self, indices: Sequence[int]) -> Callable[[], Gathered]:
        """Draw what the batch needs now, and return what makes it, in any thread."""
        places = self.pictures.places_of(indices)
        if self.seed is None:
            key = int(torch.randint(2**KEY_BITS, ()).item())
            drawn = uniforms(key, 0, np.arange(len(places)))
        else:
            drawn = self._drawn(indices, places, self.seed)
        return lambda: self._made(places, drawn)

    def _drawn(self, indices: Sequence[int], places: Numbers, seed: int) -> Any:
        numbers = self.pictures.numbers_of(places)
        epochs = [getattr(index, "epoch", 0) for index in indices]
        if len(set(epochs)) <= 1:
            return uniforms(seed, epochs[0] if epochs else 0, numbers)
        pairs = zip(epochs, numbers, strict=True)
        return np.concatenate([uniforms(seed, epoch, [number]) for epoch, number in pairs])

    def _made(self, places: Numbers, drawn: Any) -> Gathered:
        columns = self.pictures.others(places)
        columns.insert(self.image, self._cropped(places, drawn))
        return Gathered(self.pictures.header, columns)

    def _cropped(self, places: Numbers, drawn: Any) -> torch.Tensor:
        pictures = self.pictures
        if isinstance(pictures, ResidentPictures) and pictures.is_cut_at_once(self.crops):
            return pictures.crop_batch(places, self.crops, drawn)
        return crop_batch(pictures, places, self.crops, drawn)


def cropped(
    source: PackedDataset | ResidentPictures, crops: Crops, *, seed: int | None = None
) -> Cropped:
    """Return random crops of the pictures of a source, made a whole batch at a time.

    Args:
        source: what `flatout.data.open` or `flatout.data.load_pictures` gave.
        crops: what becomes of each picture.
        seed: draws the crops as a function of seed, epoch and sample; the epoch comes with
            `flatout.data.GlobalOrder`. None draws from torch's stream, again for each batch.

    Raises:
        UserError: if the samples have no picture, or fields that do not stack.
    """
    pictures = source if isinstance(source, ResidentPictures) else StoredPictures(source)
    return Cropped(pictures, crops, seed)


def crop_batch(pictures: Pictures, places: Numbers, crops: Crops, drawn: Any) -> torch.Tensor:
    """Return the crops of these samples, in one tensor."""
    side, count = crops.side, len(places)
    dtype = torch.float32 if crops.mean else torch.uint8
    whole = empty_batch((count, side, side, CHANNELS), dtype)
    write = _writer(crops)
    rows = whole.view(count, side, side * CHANNELS)
    for first in range(0, count, PART):
        part = slice(first, first + PART)
        held = pictures.pictures(places[part])
        sizes = np.array([each.shape[:2] for each in held])
        try:
            found = boxes(crops, drawn[part], sizes[:, 0], sizes[:, 1])
        except ValueError as error:
            raise UserError(str(error)) from None
        pairs = zip(held, found.tolist(), strict=True)
        for number, (picture, box) in enumerate(pairs, first):
            pixels = picture.part(box) if isinstance(picture, Undecoded) else picture
            write(pixels, box, rows[number])
    return whole.permute(0, 3, 1, 2) if crops.mean else whole


def crop(picture: torch.Tensor, box: Sequence[int], crops: Crops) -> torch.Tensor:
    """Return one crop as rows of pixels: side x (side * channels), uint8."""
    cut = _cut(picture, box)
    if crops.scale is not None:
        cut = _resized(cut, crops.side)
    if box[FLIP]:
        cut = cut.flip(3)
    return cut.permute(0, 2, 3, 1).reshape(crops.side, crops.side * CHANNELS)


def _cut(picture: torch.Tensor, box: Sequence[int]) -> torch.Tensor:
    down, across, channel = picture.stride()
    # The batch's stride has to be the largest: else torch does not see that channels lie innermost,
    # and takes three times as long.
    return picture.as_strided(
        (1, CHANNELS, box[HEIGHT], box[WIDTH]),
        (down * picture.shape[0], channel, down, across),
        picture.storage_offset() + down * box[TOP] + across * box[LEFT],
    )


def _resized(cut: torch.Tensor, side: int) -> torch.Tensor:
    return functional.interpolate(cut, (side, side), mode="bilinear", antialias=True)


Write: TypeAlias = Callable[[torch.Tensor, Sequence[int], torch.Tensor], None]
"""Puts the crop of a picture into its row of the batch."""


def _writer(crops: Crops) -> Write:
    """Return what crops: by one call into C after torch's resizing, or all by torch."""
    side, normal = crops.side, None
    if crops.mean:
        scale, shift = scale_and_shift(crops.mean, crops.std)
        normal = scale.repeat(side), shift.repeat(side)
    if side > MOST_SIDE or not can_cut():
        return lambda picture, box, target: _put(crop(picture, box, crops), normal, target)
    writer = RowWriter(side, normal)

    def write(picture: torch.Tensor, box: Sequence[int], target: torch.Tensor) -> None:
        if crops.scale is not None:
            made = _resized(_cut(picture, box), side)[0].permute(1, 2, 0)
            picture, box = made, (0, 0, side, side, box[FLIP])
        writer.write(picture.contiguous(), box, target)

    return write


def _put(
    rows: torch.Tensor, normal: tuple[torch.Tensor, torch.Tensor] | None, target: torch.Tensor
) -> None:
    if normal is None:
        target.copy_(rows)
    else:
        torch.addcmul(normal[1], rows, normal[0], out=target)
