"""Undo one entry of a trial's journal; nothing that was not made in the trial is ever deleted.

Entries are undone latest first, so each finds the folder as it was right after its change.
"""

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

KEPT_SUFFIX = ".flatout-kept"
"""Added to what stands in the way and may be the user's: a subprocess moved it, unseen by us."""


def undo(kind: str, path: str, other: Any, number: Any) -> None:
    """Undo one entry. Repeating it is harmless: a rollback may be killed and start again."""
    # Already gone, or its folder was new and is gone: then nothing is left to restore.
    with contextlib.suppress(OSError):
        _UNDO[kind](Path(path), other, number)


def _remove_new(path: Path, _other: None, _number: None) -> None:
    path.unlink()


def _remove_folder(path: Path, _other: None, since: float) -> None:
    """Remove a new folder with what was written in it; C++ and other programs write unseen."""
    if not _is_folder(path):
        if path.lstat().st_mtime >= since:
            path.unlink()
        return
    for child in list(path.iterdir()):
        with contextlib.suppress(OSError):
            _remove_folder(child, None, since)
    path.rmdir()  # fails where something older is left: that was moved here, so it stays


def _put_back(path: Path, aside: str, _number: None) -> None:
    if not os.path.lexists(aside):
        return
    if _is_folder(path):
        _keep(path)
    Path(aside).replace(path)


def _copy_back(path: Path, aside: str, _number: None) -> None:
    shutil.copy2(aside, path)
    Path(aside).unlink()


def _put_back_tree(path: Path, aside: str, since: float) -> None:
    if os.path.lexists(aside):
        _make_way(path, since)
        Path(aside).rename(path)


def _restore_link(path: Path, target: str, mtime_ns: int) -> None:
    if _is_folder(path):
        _keep(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def _rename_back(source: Path, target: str, inode: int) -> None:
    """Rename back, unless the rename failed in the trial: then the source is still there."""
    renamed = Path(target)
    if os.path.lexists(source):
        if renamed.lstat().st_ino != inode:
            return
        _keep(source)  # made by another program after the rename
    try:
        source.parent.mkdir(parents=True, exist_ok=True)
        renamed.rename(source)
    except OSError:
        _keep(renamed)  # an earlier entry may delete what has this name


def _make_way(path: Path, since: float) -> None:
    """Remove what the trial put here; what is older gets another name."""
    with contextlib.suppress(OSError):
        _remove_folder(path, None, since)
    if os.path.lexists(path):
        _keep(path)


def _keep(path: Path) -> None:
    for number in itertools.count():
        name = path.with_name(f"{path.name}{KEPT_SUFFIX}{number or ''}")
        if not os.path.lexists(name):
            path.rename(name)
            return


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


_UNDO: dict[str, Callable[[Path, Any, Any], None]] = {
    "new": _remove_new,
    "folder": _remove_folder,
    "moved": _put_back,
    "copied": _copy_back,
    "tree": _put_back_tree,
    "link": _restore_link,
    "renamed": _rename_back,
}
