"""Files that flatout writes: whole or not at all."""

import contextlib
import os
import tempfile
from pathlib import Path


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


def _umask() -> int:
    """Return the process's mask: a temporary file is private, what was asked for is not."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
