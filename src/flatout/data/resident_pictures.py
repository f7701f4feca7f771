"""Decoded pictures of one size in memory, on the device where there is one, to be cropped there.

`load_pictures` makes `ResidentPictures`; `StoredPictures` gives those of a packed store as tensors:
raw pixels where they lie, files decoded.
"""

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flatout.data import pictures, values
from flatout.data.byte_batches.ring import sent
from flatout.data.format import Header
from flatout.data.packed_store import check_records
from flatout.data.random_crops import (
    FLIP,
    LEFT,
    TOP,
    Crops,
    Numbers,
    Undecoded,
    boxes,
    normalised,
    scale_and_shift,
    undecoded,
)
from flatout.data.reader import SCALARS, PackedDataset, empty_batch
from flatout.kernels.windows import MOST_SIDE, can_cut, cut_windows
from flatout.records.errors import UserError

CHANNELS = 3
LOCK = threading.Lock()


class StoredPictures:
    """What `Cropped` reads of a packed data set."""

    def __init__(self, data: PackedDataset) -> None:
        if data.transform is not None:
            raise UserError("the crops take the transform's place; open the store without one")
        if not callable(data.decode) and data.decode not in ("", "tensor"):
            raise UserError(f"crops need pixels, not decode={data.decode!r}; leave it out")
        self.data, self.header = data, data.header
        self.image = image_place(self.header)
        self._shards: dict[int, torch.Tensor] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": {}}

    def __len__(self) -> int:
        return len(self.data)

    def places_of(self, indices: Sequence[int]) -> Numbers:
        """Return the places in stored order."""
        return self.data.places_of(indices)

    def numbers_of(self, places: Numbers) -> Numbers:
        """Return the samples' numbers in the source."""
        found: Numbers = self.data.store.index["original"][places].astype(np.int64)
        return found

    def pixels(self, places: Numbers) -> list[torch.Tensor]:
        """Return views of raw pixels, and other images decoded."""
        return [x.whole() if isinstance(x, Undecoded) else x for x in self.pictures(places)]

    def pictures(self, places: Numbers) -> list[torch.Tensor | Undecoded]:
        """Return views of raw pixels, and other images decoded, or to be decoded in parts."""
        store, fields = self.data.store, len(self.header.fields)
        check_records(store, places)
        shards, begins, _ = (column.tolist() for column in store.spans(places))
        found: list[torch.Tensor | Undecoded] = []
        for place, shard, begin in zip(places.tolist(), shards, begins, strict=True):
            at = store.payload_at(shard, begin, fields, self.image)
            shape = pictures.raw_shape(store.bytes_at(shard, at, 1 + pictures.SIZE.size))
            if shape is not None and shape[2] == CHANNELS:
                strides = (CHANNELS * shape[1], CHANNELS, 1)
                whole = self._shard(shard)
                found.append(whole.as_strided(shape, strides, at + 1 + pictures.SIZE.size))
            else:
                found.append(self._decoded(store.parts(place)[self.image]))
        store.was_read(places)
        return found

    def others(self, places: Numbers) -> list[torch.Tensor]:
        """Return the other fields, stacked."""
        others = [n for n in range(len(self.header.fields)) if n != self.image]
        if not others:
            return []
        labels = self._labels(others, places)
        if labels is not None:
            return labels
        parts = [self.data.store.parts(place) for place in places.tolist()]
        return [self._stacked(number, [row[number] for row in parts]) for number in others]

    def _labels(self, others: Sequence[int], places: Numbers) -> list[torch.Tensor] | None:
        """Return the label from the index, if there is nothing else: no record is opened."""
        fields = self.header.fields
        is_alone = [fields[number].name for number in others] == [self.header.label]
        labels = self.data.store.labels() if is_alone else None
        if labels is None or fields[others[0]].kind != "int":
            return None
        return [torch.from_numpy(labels[places].astype(np.int64))]

    def _stacked(self, number: int, parts: Sequence[memoryview]) -> torch.Tensor:
        field = self.header.fields[number]
        if field.kind in SCALARS:
            plain = [values.value(field, part) for part in parts]
            return torch.tensor(plain, dtype=SCALARS[field.kind])
        return torch.from_numpy(np.stack([values.array_in(field, part) for part in parts]))

    def _decoded(self, part: memoryview) -> torch.Tensor | Undecoded:
        file = pictures.file_bytes(part)
        if callable(self.data.decode) and file is not None:
            return torch.as_tensor(self.data.decode(file))

        def whole() -> torch.Tensor:
            return torch.from_numpy(pictures.rgb_pixels(part).copy())

        return undecoded(file, whole) or whole()

    def _shard(self, number: int) -> torch.Tensor:
        """Return a file shard's bytes; they cannot be written, and nothing here writes them."""
        if number not in self._shards:
            with LOCK, warnings.catch_warnings():  # what it changes is the whole process's
                warnings.filterwarnings("ignore", message=".*not writable.*")
                self._shards[number] = torch.from_numpy(self.data.store.arrays[number])
        return self._shards[number]


def image_place(header: Header) -> int:
    """Return which field is the picture."""
    images = [n for n, field in enumerate(header.fields) if field.kind == "image"]
    if len(images) != 1:
        raise UserError(f"crops need samples with one image; these have {len(images)}")
    for number, field in enumerate(header.fields):
        is_array = field.kind == "array" and field.shape is not None
        if number != images[0] and field.kind not in ("int", "float", "bool") and not is_array:
            raise UserError(
                f"crops come in whole batches, and the field {field.name!r} ({field.kind}) does "
                "not stack; open the store with a transform instead"
            )
    return images[0]


PART = 64
"""Pictures that are copied at a time."""


class ResidentPictures:
    """Pictures and the fields alongside them, as one tensor each.

    On a GPU the crops, mirrored and normalised, of a whole batch are one indexing operation and one
    product; on a CPU with a compiler one call into C, without one they are taken out one by one.
    """

    def __init__(
        self,
        header: Header,
        images: torch.Tensor,
        columns: Sequence[torch.Tensor],
        numbers: Numbers,
    ) -> None:
        self.header, self.images, self.columns = header, images, tuple(columns)
        self.numbers = numbers

    def __len__(self) -> int:
        return len(self.images)

    @property
    def device(self) -> torch.device:
        """Where they lie."""
        return self.images.device

    def places_of(self, indices: Sequence[int]) -> Numbers:
        """Return the rows of samples, negative numbers from the end."""
        wanted = np.asarray(indices, dtype=np.int64)
        if len(wanted) and not -len(self) <= wanted.min() <= wanted.max() < len(self):
            raise IndexError(f"samples {wanted.min()} to {wanted.max()} of {len(self)}")
        return wanted % max(1, len(self))

    def numbers_of(self, places: Numbers) -> Numbers:
        """Return the samples' numbers in the source."""
        return self.numbers[places]

    def pictures(self, places: Numbers) -> list[torch.Tensor]:
        """Return views of the pictures."""
        return [self.images[place] for place in places.tolist()]

    def others(self, places: Numbers) -> list[torch.Tensor]:
        """Return the other fields' rows."""
        rows = torch.from_numpy(places)
        return [column.index_select(0, sent(rows, column.device)) for column in self.columns]

    def is_cut_at_once(self, crops: Crops) -> bool:
        """Return whether a batch's crops are made in one operation."""
        if self.device.type != "cpu":
            return True
        is_usual = self.images.dtype == torch.uint8 and self.images.is_contiguous()
        return is_usual and crops.scale is None and crops.side <= MOST_SIDE and can_cut()

    def crop_batch(self, places: Numbers, crops: Crops, drawn: Any) -> torch.Tensor:
        """Return the crops of a batch in one operation, on the device of the pictures."""
        if crops.scale is not None:
            raise UserError(
                "on a device pictures are cut, not resized: give Crops(scale=None) and keep them "
                "at about the size of the crop"
            )
        height, width = (np.full(len(places), side) for side in self.images.shape[1:3])
        try:
            found = boxes(crops, drawn, height, width)
        except ValueError as error:
            raise UserError(str(error)) from None
        if self.device.type == "cpu":
            return self._cut_here(places, crops, found)
        return self._cut_there(torch.from_numpy(places), torch.from_numpy(found), crops)

    def _cut_there(self, places: torch.Tensor, found: torch.Tensor, crops: Crops) -> torch.Tensor:
        rows, where = sent(places, self.device), sent(found, self.device)
        cut = cut_out(self.images, rows, where, crops.side)
        return normalised(cut, crops.mean, crops.std) if crops.mean else cut

    def _cut_here(self, places: Numbers, crops: Crops, found: Numbers) -> torch.Tensor:
        dtype = torch.float32 if crops.mean else torch.uint8
        whole = empty_batch((len(places), crops.side, crops.side, CHANNELS), dtype)
        normal = None
        if crops.mean:
            scale, shift = scale_and_shift(crops.mean, crops.std)
            normal = scale.repeat(crops.side), shift.repeat(crops.side)
        if not cut_windows(self.images, places, np.ascontiguousarray(found), whole, normal):
            raise AssertionError("a box that was drawn does not lie in its picture")
        return whole.permute(0, 3, 1, 2) if crops.mean else whole


def cut_out(
    images: torch.Tensor, rows: torch.Tensor, where: torch.Tensor, side: int
) -> torch.Tensor:
    """Return a window of each of these rows of images, some mirrored: one gather.

    `images` are count x height x width x channels; `where` has a box a row, as `boxes` gives them.
    """
    steps = torch.arange(side, device=images.device)
    across = torch.where(where[:, FLIP, None].bool(), side - 1 - steps, steps)
    ys, xs = where[:, TOP, None] + steps, where[:, LEFT, None] + across
    return images[rows[:, None, None], ys[:, :, None], xs[:, None, :]]


def load_pictures(
    data: PackedDataset, *, device: torch.device | str = "cpu", side: int = 0
) -> ResidentPictures:
    """Return all pictures of a packed store in the memory of a device.

    Args:
        data: what `flatout.data.open` gave.
        device: where they are to lie.
        side: cut each to this height and width, from its middle; 0 if all have one size.

    Raises:
        UserError: if the pictures differ in size, or are smaller than `side`.
    """
    stored = StoredPictures(data)
    count = len(stored)
    if not count:
        raise UserError("the store has no samples")
    first = stored.pixels(np.zeros(1, np.int64))[0]
    shape = (side, side, 3) if side else tuple(first.shape)
    images = torch.empty((count, *shape), dtype=torch.uint8, device=device)
    columns: list[list[torch.Tensor]] = []
    places = stored.places_of(range(count))
    for start in range(0, count, PART):
        part = places[start : start + PART]
        rows = images[start : start + len(part)]
        # Copied by numpy, which leaves it to this thread: torch's threads wait for each other.
        here = rows if rows.device.type == "cpu" else torch.empty(rows.shape, dtype=torch.uint8)
        for picture, row in zip(stored.pixels(part), here, strict=True):
            np.copyto(row.numpy(), _middle(picture, side, shape).numpy())
        if here is not rows:
            rows.copy_(here)
        columns.append(stored.others(part))
    joined = [torch.cat(column).to(device) for column in zip(*columns, strict=True)]
    fields = tuple(
        replace(field, shape=shape, holder="") if number == stored.image else field
        for number, field in enumerate(stored.header.fields)
    )
    header = replace(stored.header, fields=fields)
    return ResidentPictures(header, images, joined, stored.numbers_of(places))


def _middle(picture: torch.Tensor, side: int, shape: tuple[int, ...]) -> torch.Tensor:
    if not side:
        if tuple(picture.shape) != shape:
            raise UserError(
                f"the pictures differ in size ({tuple(picture.shape)} and {shape}); give side=, "
                "which cuts each from its middle"
            )
        return picture
    height, width, _ = picture.shape
    if min(height, width) < side:
        raise UserError(f"a picture of {height} x {width} is smaller than side={side}")
    top, left = (height - side) // 2, (width - side) // 2
    return picture[top : top + side, left : left + side]
