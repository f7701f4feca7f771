"""Read JSON and TOML that may be damaged, hostile or no file at all, within bounds.

One reader for all of them: regular files only (a FIFO would block, /dev/zero never ends), limited
in size, nesting and whole numbers, and nothing but the types that JSON has. What it refuses is a
`ValueError` that says why; what cannot be read is an `OSError`.
"""

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

MAX_JSON_BYTES = 16 << 20
"""Enough for a profile of many ranks; parsed, at most some 400 MB."""
MAX_TOML_BYTES = 1 << 16
"""A recipe has a few KB; tomllib takes quadratic time for long dotted keys."""
MAX_OWN_BYTES = 1 << 28
"""Of JSON that flatout wrote for itself in a private folder: a trial of many steps and ranks."""
MAX_NPZ_BYTES = 1 << 30
"""Unpacked, of arrays that flatout wrote."""
MAX_DEPTH = 64
"""Levels of nesting: far below Python's recursion limit, which what reads it may come near."""
MAX_WHOLE = 2**64
"""Larger whole numbers become infinite as floats, or overflow an array."""


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """Return the bytes of a regular file that is not larger than allowed."""
    # Without waiting: the mere opening of a FIFO waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no regular file")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise ValueError(f"it is larger than {max_bytes} bytes")
    return data


def read_json(path: str | Path, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return what a JSON file holds."""
    return parse_json(read_bytes(path, max_bytes))


def parse_json(text: str | bytes) -> Any:
    """Return what JSON holds; numbers that are not finite, as `json.dumps` writes them, too."""
    if isinstance(text, bytes):
        text = text.decode("utf-8-sig")
    try:
        return checked(json.loads(text))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None


def check_unpacked_size(path: str | Path, max_bytes: int) -> None:
    """Make sure that a .npz file takes no more memory than allowed: 16 KB may unpack to 16 MB.

    What its members claim is enough: zipfile unpacks no more of one than that.
    """
    import zipfile  # not in every process of a script

    if not stat.S_ISREG(Path(path).stat().st_mode):
        raise ValueError("it is no regular file")
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(member.file_size for member in archive.infolist())
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OverflowError) as error:
        raise ValueError(f"it is no .npz archive: {error}") from None
    if size > max_bytes:
        raise ValueError(f"it unpacks to {size} bytes; {max_bytes} are allowed")


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the tables of a TOML file; a date is refused, since JSON has none."""
    text = read_bytes(path, MAX_TOML_BYTES).decode("utf-8-sig")
    try:
        plain: dict[str, Any] = checked(parse_toml(text))
    except RecursionError:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels") from None
    return plain


def parse_toml(text: str) -> dict[str, Any]:
    """Return the tables of TOML, as they are."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # here: a script's own Python, which reads records too, may be older and have no tomli
        import tomli as tomllib
    tables: dict[str, Any] = tomllib.loads(text)
    return tables


def checked(plain: Any, levels: int = MAX_DEPTH) -> Any:
    """Return plain values whose nesting, numbers and types are within the bounds."""
    if levels == 0:
        raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    if isinstance(plain, dict | list):
        for value in plain.values() if isinstance(plain, dict) else plain:
            checked(value, levels - 1)
    elif isinstance(plain, int):
        if abs(plain) >= MAX_WHOLE:
            raise ValueError("it holds a whole number of more than 64 bits")
    elif not isinstance(plain, str | float | None):
        raise ValueError(f"it holds a {type(plain).__name__}; write it as text")
    return plain
