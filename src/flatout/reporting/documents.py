"""Files that flatout writes and reads back: whole or not at all, with errors that help."""

import json
import math
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.records import input_files
from flatout.records.errors import UserError
from flatout.records.files import STDOUT, is_stream, linked, replace_text

MOST_INDENTED = 250_000
"""Characters of a document that a person may still read; a longer one is written without spaces."""


def write_json(plain: Mapping[str, Any], path: Path) -> None:
    """Write a JSON document, to standard output for `-`; numbers that JSON lacks become null."""
    known = finite(plain)
    text = json.dumps(known, indent=2, allow_nan=False, ensure_ascii=True)
    if len(text) > MOST_INDENTED:
        text = json.dumps(known, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    if path == STDOUT:
        sys.stdout.write(text + "\n")
        return
    write_text(text + "\n", path)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON document that flatout wrote."""
    try:
        plain = input_files.read_json(path)
    except FileNotFoundError:
        raise UserError(
            f"there is no file {path}; 'flatout measure --json {path} train.py' writes one"
        ) from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(plain, dict):
        raise UserError(f"{path} holds no flatout document; give a file that --json wrote")
    return plain


def write_text(text: str, path: Path) -> None:
    """Write alongside the target and rename, so that a full disk leaves the old file as it was."""
    try:
        replace_text(path, text)
    except IsADirectoryError:
        raise UserError(_is_folder(path)) from None
    except OSError as error:
        raise UserError(_cannot_write(path, error)) from error


def ensure_writable(folder: Path) -> None:
    """Try a file in a folder: better now than after the tuning. What is made for it is removed."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for made in missing:
            made.rmdir()
    except OSError as error:
        raise UserError(_cannot_write(folder, error)) from error


def ensure_file_writable(path: Path) -> None:
    """Try a file that is going to be written: better now than after the measurement."""
    if path.is_dir():
        raise UserError(_is_folder(path))
    if path != STDOUT and not is_stream(path):
        ensure_writable(linked(path).parent)


def finite(value: Any) -> Any:
    """Return the same plain value with None for every number that is not finite.

    >>> finite({"interval": [0.0, math.inf], "losses": (1.0, math.nan)})
    {'interval': [0.0, None], 'losses': [1.0, None]}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def _is_folder(path: Path) -> str:
    return f"{path} is a folder; name a file, such as {path / 'result.json'}"


def _cannot_write(path: Path, error: OSError) -> str:
    return f"cannot write to {path}: {error.strerror or error}; name a folder that can be written"
