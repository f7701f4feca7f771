"""NumPy arrays: the first axis counts the samples; an .npz has one array per field."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data.caching import free_memory_bytes
from flatout.data.format import Field
from flatout.data.sources.source import LABELS, Contents, fingerprint_of, need_samples, stamp_of
from flatout.data.values import ARRAY_KINDS
from flatout.records.errors import UserError
from flatout.records.input_files import check_unpacked_size

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """Arrays of equal length; every process opens them for itself."""

    contents: Contents
    path: str
    length: int
    stamp: str
    """Size and time of writing of the file that was opened: no process reads another one."""

    def __len__(self) -> int:
        return self.length

    def name(self, index: int) -> str:
        """Return the row."""
        return f"row {index}"

    def read(self, index: int) -> tuple[Any, ...]:
        """Return one row of each array; the label is a whole number."""
        arrays, label = _load(self.path, self.stamp), self.contents.label
        rows = ((one.name, arrays[one.name][index]) for one in self.contents.fields)
        return tuple(int(row) if name == label else row for name, row in rows)

    def fingerprint(self) -> str:
        """Return a hash of shapes, types, and the file's size and time of writing."""
        arrays = _load(self.path, self.stamp)
        shapes = (f"{name} {array.shape} {array.dtype}" for name, array in arrays.items())
        return fingerprint_of([*shapes, self.stamp])


def open_arrays(path: Path) -> Arrays:
    """Return the rows of an .npy or .npz file."""
    stamp = stamp_of(path)
    arrays = _load(str(path.resolve()), stamp)
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        words = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise UserError(f"{path}: the arrays have different numbers of rows ({words})")
    need_samples(max(lengths.values(), default=0), str(path))
    label = _label(arrays)
    fields = tuple(_field(name, array, is_label=name == label) for name, array in arrays.items())
    contents = Contents(
        kind="arrays",
        fields=fields,
        structure="single" if path.suffix.lower() == ".npy" else "dict",
        root=str(path.resolve().parent),
        label=label,
    )
    length = next(iter(lengths.values()))
    return Arrays(contents=contents, path=str(path.resolve()), length=length, stamp=stamp)


@lru_cache(maxsize=1)
def _load(path: str, stamp: str) -> dict[str, Array]:
    """Return the arrays of a file; a plain .npy stays on disk and is mapped."""
    if stamp_of(path) != stamp:
        raise UserError(f"{path} was written to while it was packed; pack it when it is finished")
    if not path.lower().endswith(".npy"):
        try:
            check_unpacked_size(path, free_memory_bytes())
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read as plain arrays: {error}") from None
    try:
        if path.lower().endswith(".npy"):
            arrays = {"value": np.load(path, mmap_mode="r", allow_pickle=False)}
        else:
            with Path(path).open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
    except Exception as error:  # noqa: BLE001  zipfile, zlib and headers raise nearly every class
        raise UserError(
            f"{path} cannot be read as plain arrays: {error}; arrays of Python objects are never "
            "unpickled: save numbers, or pack a data set that returns them"
        ) from None
    odd = [name for name, array in arrays.items() if not _is_of_numbers(array)]
    if odd:
        raise UserError(f"{path}: {', '.join(odd)} holds no numbers; pack a data set instead")
    return arrays


def _is_of_numbers(array: Any) -> bool:
    """Return whether it is an array of numbers; what else an .npz holds comes as bytes."""
    return isinstance(array, np.ndarray) and array.dtype.kind in ARRAY_KINDS


def _label(arrays: dict[str, Array]) -> str:
    whole = {n.lower(): n for n, a in arrays.items() if a.ndim == 1 and a.dtype.kind in "iu"}
    return next((whole[name] for name in LABELS if name in whole), "")


def _field(name: str, array: Array, *, is_label: bool) -> Field:
    if is_label:
        return Field(name=name, kind="int")
    dtype = array.dtype.newbyteorder("<").str
    return Field(name=name, kind="array", dtype=dtype, holder="numpy")
