"""Undo one entry of a trial's journal; nothing that the trial did not make is deleted.

Entries are undone latest first, so each finds the folder as it was right after its change.
"""

import contextlib
import errno
import itertools
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatout.seams.journal_file import Entry

KEPT_SUFFIX = ".flatout-kept"
"""Added to what stands in the way and may be the user's: a subprocess moved it, unseen by us."""
ORIGINAL_SUFFIX = ".flatout-original"
"""Added to what was there before the trial, where another program has put something newer since."""


Owned = set[int | tuple[int, int]]
"""Inodes, or inodes with the time of the last change in nanoseconds."""


@dataclass(slots=True, kw_only=True)
class Place:
    """What is known when one entry is undone."""

    owned: Owned | None = None
    """What the trial put at the path after this entry; None where it is not known."""
    until: float = math.inf
    """When the trial's last process may have written; what is newer is another program's."""
    kept: list[str] = field(default_factory=list)
    """What could not be put back as it was, one line each."""
    spared: set[str] = field(default_factory=set)
    """Paths that another program is known to have written: a new folder with them stays."""

    def is_of_trial(self, status: os.stat_result) -> bool:
        """Tell whether the trial made this, as far as can be known."""
        if status.st_mtime > self.until:
            return False
        names = {status.st_ino, (status.st_ino, status.st_mtime_ns)}
        return self.owned is None or bool(self.owned & names)


def undo(entry: Entry, place: Place) -> None:
    """Undo one entry. Repeating it is harmless: a rollback may be killed and start again.

    Raises:
        OSError: if there is something to restore and that failed: it is still where it was.
    """
    # Already gone, or its folder was new and is gone: then nothing is left to restore.
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        _UNDO[entry.kind](Path(entry.path), entry, place)


def _remove_new(path: Path, _entry: Entry, place: Place) -> None:
    if _is_folder(path) or not place.is_of_trial(path.lstat()):
        place.kept.append(f"{path} was made by another program and stays")
        place.spared.add(str(path))
        return
    path.unlink()


def _remove_folder(path: Path, entry: Entry, place: Place) -> None:
    """Remove a new folder with what was written in it; C++ and other programs write unseen."""
    _empty(path, entry.number, place)
    if os.path.lexists(path):
        place.kept.append(f"{path} was made by the trial and stays: another program wrote there")


def _empty(path: Path, since: float, place: Place) -> None:
    """Remove what is not older and not newer than the trial; the rest was moved here, and stays."""
    if not _is_folder(path):
        is_new = since <= path.lstat().st_mtime <= place.until
        if is_new and str(path) not in place.spared:
            path.unlink()
        return
    for child in list(path.iterdir()):
        _empty(child, since, place)
    try:
        path.rmdir()
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise


def _put_back(path: Path, entry: Entry, place: Place) -> None:
    aside = Path(entry.other or "")
    if not os.path.lexists(aside):
        return
    if _is_folder(path):
        _keep(path, place)
    elif os.path.lexists(path) and not place.is_of_trial(path.lstat()):
        aside.rename(_original_name(path, place))
        return
    aside.replace(path)


def _copy_back(path: Path, entry: Entry, _place: Place) -> None:
    aside = Path(entry.other or "")
    if os.path.lexists(aside):
        shutil.copy2(aside, path)  # the same file as before: its folder allows no other
        aside.unlink()


def _put_back_tree(path: Path, entry: Entry, place: Place) -> None:
    aside = Path(entry.other or "")
    if os.path.lexists(aside):
        if os.path.lexists(path):
            _empty(path, entry.number, place)
        if os.path.lexists(path):
            _keep(path, place)
        shutil.move(aside, path)  # a rename, but for what was copied to another file system


def _restore_link(path: Path, entry: Entry, place: Place) -> None:
    target, mtime_ns = entry.other or "", int(entry.number)
    if path.is_symlink() and str(path.readlink()) == target:
        return
    if _is_folder(path):
        _keep(path, place)
    elif os.path.lexists(path) and not place.is_of_trial(path.lstat()):
        path = _original_name(path, place)
    path.unlink(missing_ok=True)
    path.symlink_to(target)
    os.utime(path, ns=(mtime_ns, mtime_ns), follow_symlinks=False)


def _rename_back(source: Path, entry: Entry, place: Place) -> None:
    """Rename back, unless the rename failed in the trial: then the source is still there."""
    renamed = Path(entry.other or "")
    if os.path.lexists(source):
        if renamed.lstat().st_ino != entry.number:
            return
        _keep(source, place)  # made by another program after the rename
    try:
        source.parent.mkdir(parents=True, exist_ok=True)
        renamed.rename(source)
    except FileNotFoundError:
        raise
    except OSError:
        _keep(renamed, place)  # an earlier entry may delete what has this name
        raise


def _original_name(path: Path, place: Place) -> Path:
    name = _free_name(path, ORIGINAL_SUFFIX)
    place.spared.update((str(path), str(name)))
    place.kept.append(
        f"{path} was changed by another program and stays; what was there before is {name}"
    )
    return name


def _keep(path: Path, place: Place) -> None:
    name = _free_name(path, KEPT_SUFFIX)
    path.rename(name)
    place.spared.add(str(name))
    place.kept.append(f"{path} was in the way of what was there before and is {name} now")


def _free_name(path: Path, suffix: str) -> Path:
    names = (path.with_name(f"{path.name}{suffix}{number or ''}") for number in itertools.count())
    return next(name for name in names if not os.path.lexists(name))


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


_UNDO: dict[str, Callable[[Path, Entry, Place], Any]] = {
    "new": _remove_new,
    "folder": _remove_folder,
    "moved": _put_back,
    "copied": _copy_back,
    "tree": _put_back_tree,
    "link": _restore_link,
    "renamed": _rename_back,
}
KINDS = frozenset(_UNDO)
