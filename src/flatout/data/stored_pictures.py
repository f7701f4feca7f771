"""The pictures of a packed store as tensors: raw pixels where they lie, files decoded."""

import threading
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flatout.core.errors import UserError
from flatout.data import pictures, values
from flatout.data.crops import Numbers
from flatout.data.format import Header
from flatout.data.packed_store import check_records
from flatout.data.reader import SCALARS, PackedDataset
from flatout.data.undecoded import Undecoded, undecoded

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

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
    """Return which field is the picture.

    Raises:
        UserError: if none is or several are, or the others do not stack.
    """
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
