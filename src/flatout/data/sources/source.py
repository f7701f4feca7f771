"""What every source has, and what several of them share."""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from flatout.data.format import MAX_FIELD_BYTES, BadSample, Field, Skipped
from flatout.records.errors import UserError
from flatout.records.input_files import read_bytes

LABELS = ("label", "labels", "class", "cls", "target", "targets", "y")
"""Names of fields that are taken for the label, the first of them that is there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """What a source holds."""

    kind: str
    fields: tuple[Field, ...]
    structure: str
    root: str = ""
    """What the samples' names are relative to."""
    label: str = ""
    classes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    """What was left out before a sample was read."""
    is_named: bool = False
    """Whether samples have names of their own, which are then stored."""
    ignored: int = 0
    """Files that are of no kind that is packed."""
    sample_of: int = 0
    """Samples of the whole source, where these are some of them only; else 0."""


class Source(Protocol):
    """A fixed number of samples that can be read in any order, in any process."""

    @property
    def contents(self) -> Contents:
        """What the samples are made of."""
        ...

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """Return what a sample is called in messages; no two are called the same."""
        ...

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the values of a sample's fields.

        Raises:
            BadSample: if it cannot be read.
        """
        ...

    def fingerprint(self) -> str:
        """Return a hash that changes when samples come, go, or their files are written again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceSample:
    """Some of a source's samples, spread evenly over all of them."""

    whole: Source
    size: int

    @property
    def contents(self) -> Contents:
        """What the samples are made of."""
        return replace(self.whole.contents, sample_of=len(self.whole))

    def __len__(self) -> int:
        return self.size

    def name(self, index: int) -> str:
        """Return what a sample is called in the whole source."""
        return self.whole.name(self._number(index))

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the values of a sample's fields."""
        return self.whole.read(self._number(index))

    def fingerprint(self) -> str:
        """Return a hash that changes with the whole source, and with the size of the sample."""
        return fingerprint_of([self.whole.fingerprint(), str(self.size)])

    def _number(self, index: int) -> int:
        return int(sampled_numbers(len(self.whole), self.size)[index])


@cache
def sampled_numbers(whole: int, size: int) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the numbers of a sample of so many of a source's samples, ascending.

    >>> sampled_numbers(100, 4).tolist()
    [0, 33, 66, 99]
    """
    return np.linspace(0, whole - 1, size).astype(np.int64)


def fingerprint_of(parts: Iterable[str]) -> str:
    """Return one hash of many texts."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(part.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def stamp_of(path: str | Path) -> str:
    """Return a file's size and the time it was last written, in words; `gone` without one."""
    try:
        found = os.stat(path)  # noqa: PTH116  a million names: no object for each
    except (OSError, ValueError):  # no name of a file has a null byte
        return "gone"
    return f"{found.st_size} {found.st_mtime_ns}"


def label_in(fields: Iterable[Field]) -> str:
    """Return the name of the field that is the label, empty for none.

    >>> label_in([Field(name="image", kind="image"), Field(name="cls", kind="int")])
    'cls'
    """
    whole = {field.name.lower(): field.name for field in fields if field.kind == "int"}
    return next((whole[name] for name in LABELS if name in whole), "")


def read_file(path: Path) -> bytes:
    """Return a file's bytes."""
    try:
        return read_bytes(path, MAX_FIELD_BYTES)
    except FileNotFoundError:
        raise BadSample("the file is gone") from None
    except OSError as error:
        raise BadSample(f"the file cannot be read ({error.strerror})") from None
    except ValueError as error:
        what = "no file has such a name" if "\0" in str(path) else "the file cannot be read"
        raise BadSample(f"{what} ({error})") from None


def read_span(path: str, begin: int, size: int) -> bytes:
    """Return the bytes of a part of a file, none where it is cut off or too large."""
    try:
        # Buffered, though it is one read: a single call of the system ends at 2 GiB.
        with open(path, "rb") as file:  # noqa: PTH123  millions of reads: no object for each
            # What tells of the size may be wrong: memory for it is taken before a byte is read.
            left = os.fstat(file.fileno()).st_size - begin
            if size > min(left, MAX_FIELD_BYTES):
                return b""
            file.seek(begin)
            return file.read(size)
    except OSError as error:
        raise BadSample(f"{path} cannot be read ({error.strerror})") from None


def files_of_kind(folder: Path, suffixes: Iterable[str]) -> list[Path]:
    """Return what a folder holds with one of these endings, in capitals or not, by name."""
    return [item for item in sorted(folder.iterdir()) if item.suffix.lower() in suffixes]


def need_samples(count: int, what: str) -> None:
    """Make sure that there is something to pack."""
    if not count:
        raise UserError(f"{what} holds no samples; there is nothing to pack")
