"""Lines of text: .jsonl (one JSON mapping a line) and .txt (one text a line).

The file is indexed once, eight bytes a line; lines are then read by their offsets.
"""

import json
from codecs import BOM_UTF8
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatout.data import values
from flatout.data.format import BadSample, Field
from flatout.data.sources.source import (
    Contents,
    fingerprint_of,
    label_in,
    need_samples,
    read_span,
    stamp_of,
)
from flatout.records.errors import UserError

BLOCK_BYTES = 1 << 24
"""Read at a time while the lines are counted."""
BLANK_BYTES = 8
"""Lines up to this length are looked at: blanks and a carriage return are no sample."""
TEXT = Field(name="text", kind="str")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """The lines of one file that are not blank."""

    contents: Contents
    path: str
    spans: "np.ndarray[Any, np.dtype[np.int64]]" = field(repr=False)
    """Begin and end of each line in the file."""
    is_json: bool
    stamp: str
    """Size and time of writing of the file when its lines were counted."""

    def __len__(self) -> int:
        return len(self.spans)

    def name(self, index: int) -> str:
        """Return the line; lines that are not blank are counted from 1."""
        return f"line {index + 1}"

    def read(self, index: int) -> tuple[Any, ...]:
        """Return the text, or the values of the mapping in the order of the fields."""
        begin, end = map(int, self.spans[index])
        try:
            text = _pread(self.path, begin, end).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadSample(f"not UTF-8 ({error})") from None
        if not self.is_json:
            return (text,)
        row = _mapping(text)
        names = [one.name for one in self.contents.fields]
        if set(row) != set(names):
            odd = ", ".join(sorted(set(row) ^ set(names)))
            raise BadSample(f"it has other keys than the first line ({odd})")
        return tuple(_fitting(one, row[one.name]) for one in self.contents.fields)

    def fingerprint(self) -> str:
        """Return a hash of where the lines lie, and of when the file was written."""
        return fingerprint_of([self.stamp, str(len(self.spans)), self.spans.tobytes().hex()])


def open_lines(path: Path) -> Lines:
    """Return the lines of a text or JSON-lines file."""
    stamp = stamp_of(path)
    spans = _spans(path)
    need_samples(len(spans), str(path))
    is_json = path.suffix.lower() != ".txt"
    fields: tuple[Field, ...] = (TEXT,)
    if is_json:
        try:
            row = _mapping(_pread(str(path), *map(int, spans[0])).decode("utf-8", "replace"))
            fields = tuple(values.field_of(name, value) for name, value in row.items())
        except BadSample as error:
            raise UserError(f"{path}, first line: {error}") from None
    contents = Contents(
        kind="jsonl" if is_json else "text",
        fields=fields,
        structure="dict" if is_json else "single",
        root=str(path.resolve().parent),
        label=label_in(fields),
    )
    return Lines(
        contents=contents, path=str(path.resolve()), spans=spans, is_json=is_json, stamp=stamp
    )


def _spans(path: Path) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return begin and end of each line that is not blank, without the line's end.

    The mark that some programs put in front of UTF-8 is no text.
    """
    ends: list[np.ndarray[Any, np.dtype[np.int64]]] = []
    at = 0
    try:
        with path.open("rb") as file:
            first = len(BOM_UTF8) if file.read(len(BOM_UTF8)) == BOM_UTF8 else 0
            file.seek(0)
            while block := file.read(BLOCK_BYTES):
                ends.append(np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + at)
                at += len(block)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    found = np.concatenate([*ends, np.asarray([at], dtype=np.int64)])
    begins = np.concatenate([np.asarray([first], dtype=np.int64), found[:-1] + 1])
    spans = np.stack([begins, found], axis=1)
    spans = spans[spans[:, 1] > spans[:, 0]]
    short = np.flatnonzero(spans[:, 1] - spans[:, 0] <= BLANK_BYTES)
    try:
        blank = [n for n in short if not _pread(str(path), *map(int, spans[n])).strip()]
    except BadSample as error:
        raise UserError(f"{error}; pack it when it is finished") from None
    return np.delete(spans, blank, axis=0)


def _pread(path: str, begin: int, end: int) -> bytes:
    """Return a line without its carriage return."""
    line = read_span(path, begin, end - begin)
    if len(line) < end - begin:
        raise BadSample(f"{path} is shorter than it was; something cut it off or began it anew")
    return line.rstrip(b"\r")


def _mapping(text: str) -> dict[str, Any]:
    try:
        row = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadSample(f"not JSON ({error})") from None
    if not isinstance(row, dict) or not row:
        raise BadSample("not a JSON mapping with keys; write each line as {...}")
    return row


def _fitting(one: Field, value: Any) -> Any:
    """Return the value; a whole number where the first line had a floating one becomes one."""
    if one.kind != "float" or type(value) is not int:
        return value
    try:
        return float(value)
    except OverflowError as error:
        raise BadSample(f"{one.name} is no floating number ({error})") from None
