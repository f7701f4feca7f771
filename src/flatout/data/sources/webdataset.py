"""WebDataset tars: consecutive members that share their name up to its first dot are one sample.

A tar is indexed once; after that, members are read by their offsets, in any order. Members that
are links, are outside the archive's folder, or come twice are never followed or overwritten.
"""

import io
import re
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from glob import glob, has_magic
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from flatout.data import pictures
from flatout.data.format import BadSample, Field, Skipped, refuse
from flatout.data.sources.source import (
    Contents,
    fingerprint_of,
    label_in,
    need_samples,
    read_span,
    stamp_of,
)
from flatout.records.errors import UserError

INTEGER_SUFFIXES = ("cls", "cls2", "index", "inx", "id", "count")
TEXT_SUFFIXES = ("txt", "text", "transcript", "caption", "json")
"""JSON stays the text it is: the reader of the sample parses it as it always did."""
RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
Member = tuple[int, int, int]
"""Number of the tar, offset of the data, size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tars:
    """Samples in tars, each a row of members in the order of the fields."""

    contents: Contents
    paths: tuple[str, ...]
    keys: tuple[str, ...]
    members: tuple[tuple[Member, ...], ...]

    def __len__(self) -> int:
        return len(self.keys)

    def name(self, index: int) -> str:
        """Return the members' common name, behind the tar's (or its path) if there are several."""
        return self.keys[index]

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the members as images, numbers, texts, arrays or bytes."""
        pairs = zip(self.contents.fields, self.members[index], strict=True)
        return tuple(_value(field, self._bytes(member)) for field, member in pairs)

    def fingerprint(self) -> str:
        """Return a hash of names and sizes, and of when each tar was written."""
        sizes = (" ".join(str(member[2]) for member in members) for members in self.members)
        samples = (f"{k} {s}" for k, s in zip(self.keys, sizes, strict=True))
        return fingerprint_of([*map(stamp_of, self.paths), *samples])

    def _bytes(self, member: Member) -> bytes:
        number, offset, size = member
        data = read_span(self.paths[number], offset, size)
        if len(data) < size:
            raise BadSample(f"{self.paths[number]} is cut off")
        return data


def expand(pattern: str) -> list[Path]:
    """Return the tars of a pattern with `{000..009}`, `*`, `?` or `[0-9]`.

    >>> [str(path) for path in expand("a-{08..10}.tar")]
    ['a-08.tar', 'a-09.tar', 'a-10.tar']
    """
    found = RANGE.search(pattern)
    if found:
        width, first, last = len(found[1]), int(found[1]), int(found[2])
        return [
            path
            for number in range(first, last + 1)
            for path in expand(
                f"{pattern[: found.start()]}{number:0{width}}{pattern[found.end() :]}"
            )
        ]
    if not has_magic(pattern) or Path(pattern).is_file():
        return [Path(pattern)]
    return sorted(map(Path, glob(pattern)))  # noqa: PTH207  the pattern may be absolute


def open_tars(paths: Sequence[Path], *, on_bad: str) -> Tars:
    """Return the samples of some tars."""
    skipped: list[Skipped] = []
    groups: dict[str, dict[str, Member]] = {}
    are_alike = len({path.name for path in paths}) < len(paths)
    for number, path in enumerate(paths):
        prefix = f"{path if are_alike else path.name}/" if len(paths) > 1 else ""
        try:
            for key, suffix, member in _members(path, number, on_bad, skipped):
                group = groups.setdefault(prefix + key, {})
                if suffix in group:
                    refuse(
                        f"{path.name}: {key}.{suffix}",
                        "comes twice",
                        on_bad=on_bad,
                        skipped=skipped,
                    )
                    continue
                group[suffix] = member
        except BadSample as error:
            raise UserError(f"{error}; --on-bad skip leaves such members out") from None
    need_samples(len(groups), ", ".join(str(path) for path in paths) or "the pattern")
    return _assemble(paths, groups, on_bad, skipped)


def _members(
    path: Path, number: int, on_bad: str, skipped: list[Skipped]
) -> Iterator[tuple[str, str, Member]]:
    with _damage_refused(path, on_bad, skipped), tarfile.open(path, "r:") as tar:
        for info in tar:
            reason = _danger(info)
            if reason:
                refuse(f"{path.name}: {info.name}", reason, on_bad=on_bad, skipped=skipped)
            elif info.isfile():
                yield *_split(info.name), (number, info.offset_data, info.size)
        if not _is_ended(path, tar.offset):
            reason = "the tar has no end: it is damaged or cut off"
            refuse(str(path), reason, on_bad=on_bad, skipped=skipped)


@contextmanager
def _damage_refused(path: Path, on_bad: str, skipped: list[Skipped]) -> Iterator[None]:
    """Refuse the rest of a tar that is damaged, whatever is raised about it."""
    try:
        yield
    except BadSample:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # noqa: BLE001  damaged headers give numbers of any size, or none
        if _starts_with_gzip(path):
            raise UserError(f"{path} is compressed; unpack it to a plain .tar first") from None
        reason = f"the tar is damaged or cut off ({error})"
        refuse(str(path), reason, on_bad=on_bad, skipped=skipped)


def _is_ended(path: Path, at: int) -> bool:
    """Return whether a block of zeros follows the last member.

    A damaged one ends a tar silently.
    """
    with path.open("rb") as file:
        file.seek(at)
        return file.read(tarfile.BLOCKSIZE) == tarfile.NUL * tarfile.BLOCKSIZE


def _starts_with_gzip(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(2) == b"\x1f\x8b"


def _danger(info: tarfile.TarInfo) -> str:
    """Return why a member is not taken, empty for a harmless one."""
    if info.issym() or info.islnk():
        return f"is a link to {info.linkname}"
    if info.name.startswith("/") or ".." in PurePosixPath(info.name).parts:
        return "lies outside the archive"
    if not (info.isfile() or info.isdir()):
        return "is a device or pipe"
    return "is sparse" if info.issparse() else ""


def _split(name: str) -> tuple[str, str]:
    folder, _slash, base = name.removeprefix("./").rpartition("/")
    stem, _dot, suffix = base.partition(".")
    return f"{folder}/{stem}" if folder else stem, suffix.lower()


def _assemble(
    paths: Sequence[Path],
    groups: dict[str, dict[str, Member]],
    on_bad: str,
    skipped: list[Skipped],
) -> Tars:
    first = next(iter(groups.values()))
    suffixes = tuple(first)
    keys, members = [], []
    for key, group in groups.items():
        if set(group) == set(suffixes):
            keys.append(key)
            members.append(tuple(group[suffix] for suffix in suffixes))
            continue
        odd = ", ".join(sorted(set(group) ^ set(suffixes)))
        try:
            reason = f"has other parts than the first sample ({odd})"
            refuse(key, reason, on_bad=on_bad, skipped=skipped)
        except BadSample as error:
            raise UserError(f"{error}; --on-bad skip leaves such samples out") from None
    draft = Tars(
        contents=Contents(kind="webdataset", fields=(), structure="dict"),
        paths=tuple(str(path.resolve()) for path in paths),
        keys=tuple(keys),
        members=tuple(members),
    )
    fields = tuple(_field(suffix, draft, place) for place, suffix in enumerate(suffixes))
    contents = Contents(
        kind="webdataset",
        fields=fields,
        structure="dict",
        root=str(Path(draft.paths[0]).parent),
        label=label_in(fields),
        skipped=tuple(skipped),
        is_named=True,
    )
    return Tars(contents=contents, paths=draft.paths, keys=draft.keys, members=draft.members)


def _field(suffix: str, tars: Tars, place: int) -> Field:
    last = suffix.rpartition(".")[2]
    if f".{last}" in pictures.SUFFIXES:
        return Field(name=suffix, kind="image")
    if last in INTEGER_SUFFIXES:
        return Field(name=suffix, kind="int")
    if last in TEXT_SUFFIXES:
        return Field(name=suffix, kind="str")
    if last == "npy":
        return _array_field(suffix, tars, place)
    return Field(name=suffix, kind="bytes")


def _array_field(suffix: str, tars: Tars, place: int) -> Field:
    """Return the field for arrays like that of the first sample."""
    field = Field(name=suffix, kind="array", holder="numpy")
    try:
        array = _value(field, tars._bytes(tars.members[0][place]))
    except BadSample as error:
        raise UserError(
            f"{tars.keys[0]}: {error}; the first sample decides how all are stored: repair it, or "
            "remove it from the tar"
        ) from None
    return replace(field, dtype=array.dtype.newbyteorder("<").str)


def _value(field: Field, data: bytes) -> Any:
    try:
        if field.kind == "int":
            return int(data)
        if field.kind == "str":
            return data.decode("utf-8")
        return _array(data) if field.kind == "array" else data
    except ValueError as error:
        raise BadSample(f"{field.name} is no {field.kind}: {error}") from None


def _array(data: bytes) -> "np.ndarray[Any, np.dtype[Any]]":
    try:
        return np.asarray(np.lib.format.read_array(io.BytesIO(data), allow_pickle=False))
    except Exception as error:  # noqa: BLE001  a damaged header raises nearly every class
        raise BadSample(str(error)) from None
