"""The packed format: what is in the folder, and how a record is laid out. See its page in docs.

Everything is little-endian and can be read with NumPy and `json` alone; nothing is pickled.
`refuse` says what is done about a bad sample.
"""

import hashlib
import json
import re
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from flatout.records.errors import UserError
from flatout.records.files import replace_text
from flatout.records.input_files import read_json
from flatout.records.json_records import from_plain, to_plain

RAISE = "raise"


class BadSample(ValueError):  # noqa: N818  what it is, like StopIteration
    """One sample cannot be packed; the text says why. The policy decides what follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Skipped:
    """One sample that was left out."""

    name: str
    reason: str


def refuse(name: str, reason: str, *, on_bad: str, skipped: list[Skipped]) -> None:
    """Note a sample that is left out, or stop, as the policy says."""
    if on_bad == RAISE:
        raise BadSample(f"{name}: {reason}")
    skipped.append(Skipped(name=name, reason=reason))


SCHEMA = "flatout.packed/2"
SCHEMAS = ("flatout.packed/1", SCHEMA)
"""The versions that are read: the first has no checksum of the header."""
MAX_HEADER_BYTES = 64 << 20
"""Names of classes and of shards; the samples are in the index."""
SHARD = re.compile(r"shard-[0-9]{5,10}\.bin")
HEADER = "header.json"
INDEX = "index.npy"
NAMES = "names.txt"
"""One JSON text a line, in stored order."""
SKIPPED = "skipped.jsonl"
"""The samples that were left out, each with the reason; empty when none was."""
STORES = "FLATOUT_PACKED"
"""Environment variable: folders of packed stores that tunings look at, separated as in PATH."""
TIMED_SAMPLE = "FLATOUT_PACKED_SAMPLE"
"""Environment variable: the store of a sample whose images stand for all, as long as a tuning times
what packing all of them would bring."""
STAGING = ".pack"
"""Folder of a pack that is not finished: its plan, and what each finished file shard holds."""
KINDS = ("int", "float", "bool", "str", "bytes", "json", "array", "image")
STRUCTURES = ("single", "tuple", "list", "dict")
ENCODINGS = ("original", "raw", "jpeg", "qoi", "zstd", "tokens")
NO_LABEL = -(2**63)
HASH_BYTES = 16
MAX_FIELD_BYTES = 2**32 - 1
"""Lengths inside a record are 32 bits."""
ENTRY = np.dtype(
    [
        ("shard", "<u4"),
        ("offset", "<u8"),
        ("length", "<u8"),
        ("original", "<u8"),
        ("label", "<i8"),
        ("check", "<u4"),
        ("hash", "u1", (HASH_BYTES,)),
    ]
)
"""One row of the index: where the record is, which sample of the source it was, its label (or
`NO_LABEL`), the CRC-32 of the stored bytes, the BLAKE2b of the sample as the source gave it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """One part of a sample."""

    name: str
    kind: str
    """int float bool str bytes json array image"""
    dtype: str = ""
    """Of an array, as NumPy writes it."""
    holder: str = ""
    """What the source gave and the reader gives back: `numpy`, `torch` or `pil`."""
    shape: tuple[int, ...] | None = None
    """Where every sample has the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoding:
    """How images and texts are stored."""

    kind: str = "original"
    """original raw jpeg qoi zstd tokens"""
    short_side: int = 0
    """Images are made smaller until their short side has this many pixels; 0 for full size."""
    quality: int = 90
    """Of a re-encoded JPEG."""
    tokenizer: str = ""
    """`bytes`, or the path of a tokenizer.json."""

    @property
    def is_lossless(self) -> bool:
        """Whether the stored sample gives back every pixel, byte and number of the source."""
        return self.kind not in ("jpeg", "tokens") and not self.short_side


@dataclass(frozen=True, slots=True, kw_only=True)
class FileShard:
    """One file of records."""

    name: str
    samples: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a packed store holds."""

    samples: int
    fields: tuple[Field, ...]
    structure: str
    """How a sample is given: `single`, `tuple`, `list` or `dict`."""
    encoding: Encoding = Encoding()
    order: str = "shuffled"
    """`shuffled` by a global permutation, or as in the `source`."""
    seed: int = 0
    shards: tuple[FileShard, ...] = ()
    classes: tuple[str, ...] = ()
    label: str = ""
    """The field the index has as label."""
    source: Mapping[str, Any] = field(default_factory=dict)
    """Its kind, its root, and the fingerprint of what it held."""
    skipped: int = 0

    @property
    def is_lossless(self) -> bool:
        """Whether the samples are those of the source, bit by bit."""
        return self.encoding.is_lossless

    @property
    def sample_of(self) -> int:
        """How many samples the source has, where only some were packed to time them; else 0."""
        return int(self.source.get("sample_of", 0))

    def to_json(self) -> dict[str, Any]:
        """Return a plain JSON mapping."""
        plain = {"schema": SCHEMA, "is_lossless": self.is_lossless, **to_plain(self)}
        return plain | {"check": _check_of(plain)}


def _check_facts(header: Header) -> None:
    """Make sure that a header names files of its own folder, and that its numbers agree."""
    if not header.fields or any(field.kind not in KINDS for field in header.fields):
        raise ValueError(f"it has no field, or one of a kind that is none of {', '.join(KINDS)}")
    if header.structure not in STRUCTURES or header.encoding.kind not in ENCODINGS:
        raise ValueError("its structure or its encoding is not known")
    # A name may not lead out of the folder: what it names is read as samples.
    odd = [shard.name for shard in header.shards if not SHARD.fullmatch(shard.name)]
    if odd:
        raise ValueError(f"{odd[0]!r} is no name of a file shard")
    counts = [number for shard in header.shards for number in (shard.samples, shard.bytes)]
    if min([header.samples, header.sample_of, *counts]) < 0:
        raise ValueError("a number in it is negative")
    if header.samples != sum(shard.samples for shard in header.shards):
        raise ValueError("its file shards hold another number of samples")


def _check_of(plain: Mapping[str, Any]) -> str:
    """Return the hash of a header, whatever the order and the spaces it is written with."""
    text = json.dumps({**plain, "check": ""}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=HASH_BYTES).hexdigest()


def read_header(folder: Path) -> Header:
    """Return the header of a packed store."""
    path = folder / HEADER
    if not path.is_file():
        raise UserError(_why_no_header(folder))
    try:
        plain = read_json(path, MAX_HEADER_BYTES)
        schema = plain["schema"]
        if schema in SCHEMAS:
            if schema == SCHEMA and plain.get("check") != _check_of(plain):
                raise ValueError("its bytes are not those that were written")
            header = from_plain(Header, plain)
            _check_facts(header)
            return header
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(
            f"{path} is damaged ({error}); copy the store again, or pack again into an empty folder"
        ) from None
    raise UserError(
        f"{folder} has the format {str(schema)[:60]}, and this flatout reads "
        f"{' and '.join(SCHEMAS)}; pack it again, or install the flatout that wrote it"
    )


def _why_no_header(folder: Path) -> str:
    if not folder.is_dir():
        return f"there is no packed store {folder}; make one: flatout pack SRC {folder}"
    if (folder / STAGING).is_dir():
        return f"{folder} is not packed to its end; run the same `flatout pack` again to go on"
    return f"{folder} is no packed store; make one in an empty folder: flatout pack SRC DST"


def write_header(header: Header, folder: Path) -> None:
    """Write the header, whole or not at all."""
    replace_text(folder / HEADER, json.dumps(header.to_json(), indent=1, sort_keys=True) + "\n")


def shard_name(number: int) -> str:
    """Return the name of a file shard.

    >>> shard_name(7)
    'shard-00007.bin'
    """
    return f"shard-{number:05d}.bin"


def join_record(parts: Sequence[bytes]) -> bytes:
    """Return a record: the length of each field's payload, then the payloads.

    >>> join_record([b"ab", b""]).hex()
    '02000000000000006162'
    """
    if any(len(part) > MAX_FIELD_BYTES for part in parts):
        raise ValueError("one field of the sample has 4 GiB or more")
    return struct.pack(f"<{len(parts)}I", *map(len, parts)) + b"".join(parts)


def split_record(record: memoryview, fields: int) -> list[memoryview]:
    """Return the payloads of a record, without copying.

    >>> [bytes(part) for part in split_record(memoryview(join_record([b"ab", b"c"])), 2)]
    [b'ab', b'c']
    """
    parts, at = [], 4 * fields
    lengths = struct.unpack_from(f"<{fields}I", record) if at <= len(record) else (-1,)
    if at + sum(lengths) != len(record):
        raise ValueError("a record is damaged")
    for length in lengths:
        parts.append(record[at : at + length])
        at += length
    return parts


def checksum(record: bytes | memoryview) -> int:
    """Return the CRC-32 of stored bytes."""
    return zlib.crc32(record)


def content_hash(parts: Sequence[bytes]) -> bytes:
    """Return the hash of a sample as the source gave it; lengths count, so parts cannot blur."""
    digest = hashlib.blake2b(digest_size=HASH_BYTES)
    digest.update(struct.pack(f"<{len(parts)}I", *map(len, parts)))
    for part in parts:
        digest.update(part)
    return digest.digest()
