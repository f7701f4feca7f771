"""Files that flatout writes: whole or not at all."""

import contextlib
import operator
import os
import tempfile
from pathlib import Path
from typing import Any


def replace_text(path: Path, text: str) -> None:
    """Write beside the target and rename, so that a full disk leaves the old file as it was.

    Raises:
        OSError: if the folder or the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    draft = Path(name)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(text)
        draft.chmod(0o666 & ~_umask())
        draft.replace(path)
    except BaseException:  # Ctrl-C in mid-write too: no draft is left in the user's folder
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


def plain(value: Any) -> int | str:
    """Return what JSON has no form for: other libraries' whole numbers as such, the rest as text.

    Sizes of layers are often NumPy's, as those of an environment's action space are.

    >>> plain(Path("a")), plain(True)
    ('a', 1)
    """
    try:
        return operator.index(value)
    except (TypeError, ValueError):
        return str(value)


def _umask() -> int:
    """Return the process's mask: a temporary file is private, what was asked for is not."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
