"""Which paths a call means, what is there before it, and what is left. For the journal."""

import fcntl
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flatout.seams.journal_file import BESIDE

_OURS = re.compile(rf"\..*\.flatout-\d+-\d+|{re.escape(BESIDE)}.*", re.DOTALL)
"""Names of what was moved aside, and of the journals beside it."""


def resolve(raw: Any, dir_fd: int | None, *, follows: bool = False) -> str | None:
    """Return the real path of a name; a link at its end is followed only where the call does."""
    if not isinstance(raw, str | bytes | os.PathLike):
        return None
    path = os.fsdecode(raw)
    if dir_fd is not None and dir_fd >= 0:
        path = str(Path(_folder_of(dir_fd)) / path)
    folder, name = os.path.split(path.rstrip(os.sep))
    if follows or name in {"", os.curdir, os.pardir}:
        return os.path.realpath(path)
    return str(Path(os.path.realpath(folder)) / name)


def _folder_of(dir_fd: int) -> str:
    if sys.platform == "darwin":
        return os.fsdecode(fcntl.fcntl(dir_fd, fcntl.F_GETPATH, bytes(1024)).rstrip(b"\0"))
    return str(Path(f"/proc/self/fd/{dir_fd}").readlink())


def can_rename(source: str, target: str) -> bool:
    """Tell whether a rename may change anything; false where it will fail for what stands there."""
    moved = status_of(source)
    if moved is None or is_at_or_below(target, source):
        return False
    if not os.path.lexists(target):
        return True
    replaced = os.lstat(target)
    if os.path.samestat(moved, replaced):
        return False
    if stat.S_ISDIR(moved.st_mode) != stat.S_ISDIR(replaced.st_mode):
        return False
    return not stat.S_ISDIR(replaced.st_mode) or looks_empty(target)


def looks_empty(folder: str) -> bool:
    """Tell whether the script may believe a folder empty: it holds nothing but our asides."""
    return all(_OURS.fullmatch(path.name) for path in Path(folder).iterdir())


def below(folder: str) -> Iterator[str]:
    """Return everything below a folder."""
    for root, folders, names in os.walk(folder):
        yield from (str(Path(root) / name) for name in (*folders, *names))


def status_of(path: str) -> os.stat_result | None:
    """Return what has this name, None where nothing may be looked at: the call itself says so."""
    try:
        return os.lstat(path)
    except OSError:
        return None


def is_folder(path: str) -> bool:
    """Tell whether a path is a folder and not a link to one."""
    return Path(path).is_dir() and not Path(path).is_symlink()


def is_at_or_below(path: str, root: str) -> bool:
    """Tell whether a path is `root` or lies below it.

    >>> is_at_or_below("/data/old", "/data"), is_at_or_below("/data-old", "/data")
    (True, False)
    """
    return path == root or path.startswith(root + os.sep)


def move(path: str, aside: str) -> None:
    """Leave nothing of a file: it is about to be made anew."""
    Path(path).rename(aside)


def move_and_copy(path: str, aside: str) -> None:
    """Leave a copy of a file: it is about to be changed."""
    move(path, aside)
    shutil.copy2(aside, path)


def move_and_touch(path: str, aside: str) -> None:
    """Leave an empty file: it is about to be removed."""
    move(path, aside)
    Path(path).touch(0o600)
