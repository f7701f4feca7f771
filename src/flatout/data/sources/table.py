"""CSV and TSV files with a header line; a column of paths brings the files in.

A column named like a path is read as files, relative to the table. Every other column is whole
numbers, floating numbers or texts, whichever all its values are; what would not come back as it was
written, such as 007 or 1_0, is text. A text column named like a label becomes the numbers of its
sorted classes.
"""

import csv
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.data.format import MAX_FIELD_BYTES, Field
from flatout.data.pictures import SUFFIXES
from flatout.data.sources.source import (
    LABELS,
    Contents,
    fingerprint_of,
    label_in,
    need_samples,
    read_file,
    stamp_of,
)
from flatout.records.errors import UserError

PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path", "img")
"""Names of columns that are taken for paths, the first of them that is there."""

WHOLE = re.compile(r"0|-?[1-9][0-9]*")
"""A whole number as Python writes it: a column of these is numbers without losing a character."""
FLOATING = re.compile(
    r"-?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf)", re.IGNORECASE
)
"""No leading zeros and no `_`: numbers of parts, and texts that Python's `float` would take."""
MAX_WHOLE = 2**63 - 1
MAX_DIGITS = len(str(-MAX_WHOLE))
"""Longer ones do not fit into 64 bits, and Python takes its time to read very long ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSource:
    """The rows of a table, already of their types; the file of each is read when asked for."""

    contents: Contents
    rows: tuple[tuple[Any, ...], ...] = field(repr=False)
    file_at: int
    """The column that is a path; -1 for none."""

    def __len__(self) -> int:
        return len(self.rows)

    def name(self, index: int) -> str:
        """Return the path, which several rows may share, or the row."""
        return str(self.rows[index][self.file_at]) if self.file_at >= 0 else f"row {index + 1}"

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the row, its path replaced by the file's bytes."""
        row = self.rows[index]
        if self.file_at < 0:
            return row
        data = read_file(Path(self.contents.root, row[self.file_at]))
        return (*row[: self.file_at], data, *row[self.file_at + 1 :])

    def fingerprint(self) -> str:
        """Return a hash of all rows, and of when the file of each was written."""
        return fingerprint_of(f"{row!r} {self._stamp(row)}" for row in self.rows)

    def _stamp(self, row: tuple[Any, ...]) -> str:
        if self.file_at < 0:
            return ""
        return stamp_of(Path(self.contents.root, row[self.file_at]))


def open_table(path: Path) -> TableSource:
    """Return the rows of a table.

    Raises:
        UserError: if it has no rows, or a row with another number of cells than the header.
    """
    header, rows = _read(path)
    need_samples(len(rows), str(path))
    lower = {name.lower(): place for place, name in reversed(list(enumerate(header)))}
    file_at = next((lower[name] for name in PATHS if name in lower), -1)
    columns: list[list[Any]] = []
    fields: list[Field] = []
    classes: tuple[str, ...] = ()
    for place, name in enumerate(header):
        cells: list[Any] = [row[place] for row in rows]
        if place == file_at:
            fields.append(_file_field(name, cells))
        else:
            cells, kind = _typed(cells)
            if kind == "str" and name.lower() in LABELS and not classes:
                classes = tuple(sorted(set(cells)))
                numbers = {word: number for number, word in enumerate(classes)}
                cells, kind = [numbers[word] for word in cells], "int"
            fields.append(Field(name=name, kind=kind))
        columns.append(cells)
    contents = Contents(
        kind="table",
        fields=tuple(fields),
        structure="dict",
        root=str(path.resolve().parent),
        label=label_in(fields),
        classes=classes,
        is_named=file_at >= 0,
    )
    return TableSource(contents=contents, rows=tuple(zip(*columns, strict=True)), file_at=file_at)


def _read(path: Path) -> tuple[list[str], list[list[str]]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    limit = csv.field_size_limit(MAX_FIELD_BYTES)  # the module's own is 131,072 characters
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=delimiter)
            header = next(reader, [])
            rows = []
            for row in reader:
                if row and len(row) != len(header):
                    raise UserError(
                        f"{path}, line {reader.line_num}: {len(row)} cells, and the header has "
                        f"{len(header)}"
                    )
                rows += [row] if row else []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {error}") from None
    finally:
        csv.field_size_limit(limit)
    if len(set(header)) != len(header):
        raise UserError(f"{path}: two columns have the same name; rename one")
    return header, rows


def _file_field(name: str, cells: list[Any]) -> Field:
    is_image = all(str(cell).lower().endswith(SUFFIXES) for cell in cells)
    return Field(name=name, kind="image" if is_image else "bytes")


def _typed(cells: list[str]) -> tuple[list[Any], str]:
    """Return a column as numbers where none of its cells loses anything, else as texts."""
    if all(map(WHOLE.fullmatch, cells)):
        whole = [int(cell) for cell in cells] if max(map(len, cells)) <= MAX_DIGITS else []
        if whole and all(abs(number) <= MAX_WHOLE for number in whole):
            return whole, "int"
        return list(cells), "str"
    if all(map(FLOATING.fullmatch, cells)):
        return [float(cell) for cell in cells], "float"
    return list(cells), "str"
