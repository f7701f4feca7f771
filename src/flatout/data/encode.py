"""One sample of a source as the record that is stored."""

import dataclasses
import hashlib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from flatout.core.errors import UserError
from flatout.data import pictures, values
from flatout.data.format import MAX_FIELD_BYTES, Encoding, Field
from flatout.data.refusals import BadSample

BYTES = "bytes"
"""The tokenizer that needs no file: each UTF-8 byte is a token."""


def check(encoding: Encoding, fields: Sequence[Field]) -> None:
    """Make sure that the encoding can be done, and has something to do.

    Raises:
        UserError: if a package is missing, or no field is of the encoding's kind.
    """
    pictures.check_encoding(encoding)
    wanted = {"original": "", "tokens": "str"}.get(encoding.kind, "image")
    if wanted and not any(field.kind == wanted for field in fields):
        words = ", ".join(f"{field.name} ({field.kind})" for field in fields)
        what = "text" if wanted == "str" else "image"
        raise UserError(f"--encode {encoding.kind} needs a field of {what}s; there are: {words}")
    if encoding.kind == "tokens":
        _tokenizer.cache_clear()  # the file may be another one since the pack before this one
        _largest_token.cache_clear()
        _tokenizer(encoding.tokenizer)


def tokenizer_digest(encoding: Encoding) -> str:
    """Return a hash of the tokenizer's file; empty where the encoding has none."""
    if encoding.kind != "tokens" or encoding.tokenizer == BYTES:
        return ""
    return hashlib.blake2b(Path(encoding.tokenizer).read_bytes(), digest_size=16).hexdigest()


def stored_fields(fields: Sequence[Field], encoding: Encoding) -> tuple[Field, ...]:
    """Return the fields of the store: texts are arrays of tokens there."""
    if encoding.kind != "tokens":
        return tuple(fields)
    dtype = token_dtype(encoding)
    return tuple(
        dataclasses.replace(field, kind="array", dtype=dtype, holder="numpy")
        if field.kind == "str"
        else field
        for field in fields
    )


def source_parts(fields: Sequence[Field], sample: Sequence[Any]) -> list[bytes]:
    """Return the payloads of a sample as the source has it.

    Raises:
        BadSample: if a value is damaged, too large, or of another kind than in the samples before.
    """
    pairs = zip(fields, sample, strict=True)
    return [_bounded(field, values.payload(field, one)) for field, one in pairs]


def encoded_parts(
    fields: Sequence[Field], parts: Sequence[bytes], encoding: Encoding
) -> list[bytes]:
    """Return the payloads as they are stored.

    Raises:
        BadSample: if a value cannot be encoded, or is too large then.
    """
    if encoding.kind == "original":
        return list(parts)
    pairs = zip(fields, parts, strict=True)
    return [_bounded(field, _encoded(field, part, encoding)) for field, part in pairs]


def _bounded(field: Field, part: bytes) -> bytes:
    if len(part) > MAX_FIELD_BYTES:
        raise BadSample(f"field {field.name!r} has {len(part)} bytes, and 4 GiB are too many")
    return part


def _encoded(field: Field, part: bytes, encoding: Encoding) -> bytes:
    if field.kind == "image":
        return pictures.encode(part, encoding)
    if field.kind == "str" and encoding.kind == "tokens":
        tokens = _tokens(part, encoding)
        wanted = dataclasses.replace(field, kind="array", dtype=tokens.dtype.str)
        return values.payload(wanted, tokens)
    return part


def is_same(field: Field, source: bytes, stored: memoryview) -> bool:
    """Tell whether a losslessly stored payload gives back what the source has."""
    if source == stored:
        return True
    if field.kind != "image":
        return False
    before, after = pictures.open_image(memoryview(source)), pictures.open_image(stored)
    return before.mode == after.mode and np.array_equal(np.asarray(before), np.asarray(after))


def token_dtype(encoding: Encoding) -> str:
    """Return the smallest type that holds the tokenizer's words.

    >>> token_dtype(Encoding(kind="tokens", tokenizer="bytes"))
    '<u2'
    """
    if encoding.tokenizer == BYTES:
        return "<u2"
    return "<u2" if _largest_token(encoding.tokenizer) < 2**16 else "<u4"


def _tokens(part: bytes, encoding: Encoding) -> "np.ndarray[Any, np.dtype[Any]]":
    dtype = token_dtype(encoding)
    if encoding.tokenizer == BYTES:
        return np.frombuffer(part, np.uint8).astype(dtype)
    try:
        text = part.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadSample(f"the text is not Unicode ({error})") from None
    tokenizer = _tokenizer(encoding.tokenizer)
    try:
        return np.asarray(tokenizer.encode(text).ids, dtype=dtype)
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise BadSample(f"the tokenizer cannot encode the text ({error})") from None


@cache
def _largest_token(path: str) -> int:
    return max(_tokenizer(path).get_vocab(with_added_tokens=True).values(), default=0)


@cache
def _tokenizer(path: str) -> Any:
    """Return a Hugging Face tokenizer that gives all tokens of a text; nothing for `bytes`."""
    if path == BYTES:
        return None
    if not path:
        raise UserError("--encode tokens needs --tokenizer: bytes, or a tokenizer.json")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UserError("a tokenizer.json needs tokenizers: pip install 'flatout[pack]'") from None
    try:
        made = Tokenizer.from_file(path)
    except Exception as error:  # noqa: BLE001  the library raises bare Exception
        raise UserError(f"{path} is not a tokenizer.json that can be read: {error}") from None
    made.no_truncation()  # which the file may ask for, as for padding: for a model's input
    made.no_padding()
    return made
