"""The file of a trial's journal, its copies alongside the originals, and the paths a call means.

`JournalWriter` writes them in the script's process. The whole journal is in the trial's folder, in
the cache. What may hide an original is written once more into the original's own folder: there it
is found when the cache is gone, as after the end of a container, and `flatout restore` needs
nothing else (`copies_in`). `resolve` gives the paths.
"""

import contextlib
import errno
import fcntl
import json
import math
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flatout.records.input_files import MAX_OWN_BYTES, parse_json, read_bytes

JOURNAL_NAME = "journal"
CLAIMS_NAME = "claims"
"""Paths that the trial changes, between NUL bytes. Its supervisor makes the file; without it, as in
a trial that a trial's script started, nothing is claimed."""
BESIDE = ".flatout-journal-"
"""What the name of a copy begins with; the trial's name follows."""
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)
CLOCK = "clock"
"""Kind of the entry that says by how much the wall clock led, and in which boot of the machine."""
FIELDS = 5
"""Of an entry: kind, path, two that depend on the kind, and a time."""


class UnrecordedError(Exception):
    """Something could not be written to the journal, so what it is about must not happen."""

    def __init__(self, path: str, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror}")
        self.number = error.errno or errno.EIO


class Entry(NamedTuple):
    """One line of a journal."""

    kind: str
    path: str
    other: str | None
    number: float
    time: int
    """Nanoseconds of the clock that no one sets; entries of one trial have one boot."""


def boot_id() -> str | None:
    """Return what the kernel calls the time since it started; None where it has no name for it."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None


def clock_offset_s() -> float:
    """Return the wall clock's lead over a clock that no one sets: it changes when one sets it."""
    return time.time() - time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class JournalWriter:
    """Appends entries; forked children share its files, others open the same ones.

    Two trials that run at the same time change different files: each claims a path, with all below
    it, before its first change there, and ends instead where another one has claimed it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = BESIDE + folder.name
        self.main = _open(folder / JOURNAL_NAME)
        self.claims = open_claims(folder) if (folder / CLAIMS_NAME).exists() else None
        self.claimed: set[str] = set()
        self.beside: dict[str, int | None] = {}
        self.begun: set[int] = set()

    def note(self, kind: str, path: str, number: float = 0, other: str | None = None) -> None:
        """Write an entry without which nothing of the user's can be lost.

        Raises:
            UnrecordedError: if it cannot be written whole, or another trial is at work there.
        """
        self._claim(path)
        line = _line(kind, path, other, number)
        self._append(self.main, line, path)
        copy = self.beside.get(str(Path(path).parent))
        if copy is not None and kind in ("made", "gone"):
            self._append(copy, line, path)

    def note_original(
        self, kind: str, path: str, other: str, number: float = 0, *, is_new: bool = False
    ) -> None:
        """Write an entry on an original, and wait until it is on the disk.

        Of what is new with this trial no copy lies alongside it: without the journal nothing of the
        user's would be missing, and in the folder for temporary files other trials need theirs.

        Only these entries wait for the disk, once each: without them no one would know which name
        an original had. A lost note of a new file costs nothing but that the file stays, and a
        script may make thousands.

        Raises:
            UnrecordedError: if it cannot be, or another trial is at work in that folder.
        """
        self._claim(path)
        if kind == "renamed":
            self._claim(other)
        line = _line(kind, path, other, number)
        self._append(self.main, line, path)
        copy = None if is_new else self._beside(str(Path(path).parent))
        try:
            if copy is not None:
                self._append(copy, line, path)
            # Where the folder may not be written to, what is put aside is in the trial's folder.
            os.fsync(self.main if copy is None else copy)
        except OSError as error:
            raise UnrecordedError(path, error) from None

    def _append(self, descriptor: int, line: bytes, path: str) -> None:
        """Write a line whole, the first one after the state of the clocks.

        Raises:
            UnrecordedError: if it cannot be.
        """
        if descriptor not in self.begun:
            line = _line(CLOCK, path, boot_id(), clock_offset_s()) + line
            self.begun.add(descriptor)
        try:
            written = os.write(descriptor, line)
        except OSError as error:
            raise UnrecordedError(path, error) from None
        if written < len(line):
            raise UnrecordedError(path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))

    def _claim(self, path: str) -> None:
        """Claim a path and all below it.

        Raises:
            UnrecordedError: if another trial that runs has claimed that, or a part of it.
        """
        places = [path, *map(str, Path(path).parents)]
        if self.claims is None or self.claimed.intersection(places):
            return
        # First claimed, then compared: of two that do so at once, at least one sees the other.
        self._append(self.claims, b"\0%b\0" % os.fsencode(path), path)
        marks = [b"\0%b\0" % os.fsencode(place) for place in places]
        for file in self.folder.parent.glob(f"*/{CLAIMS_NAME}"):
            theirs = b"" if file.parent == self.folder else _claims_of(file)
            if any(mark in theirs for mark in (*marks, b"\0%b/" % os.fsencode(path))):
                raise UnrecordedError(path, OSError(errno.EBUSY, "another trial that runs uses it"))
        self.claimed.add(path)

    def _beside(self, folder: str) -> int | None:
        known = self.beside.get(folder)
        if folder in self.beside and (known is None or os.fstat(known).st_nlink):
            return known
        self.beside[folder] = None
        try:
            self.beside[folder] = self._open_beside(Path(folder))
        except OSError as error:
            if error.errno not in FORBIDDEN:
                raise UnrecordedError(folder, error) from None
        return self.beside[folder]

    def _open_beside(self, folder: Path) -> int:
        descriptor = _open(folder / self.name)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if any(path.name != self.name for path in copies_in(folder)):
            # Also of one that was killed: whose originals are whose could not be known any more.
            raise OSError(errno.EBUSY, "another trial has moved files aside there")
        with _opened(folder) as number:
            os.fsync(number)
        return descriptor


def open_claims(folder: Path) -> int:
    """Return a trial's file of claims; they hold as long as a process keeps one of these open."""
    descriptor = _open(folder / CLAIMS_NAME)
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _claims_of(file: Path) -> bytes:
    """Return what another trial claims; nothing of one that has ended.

    Raises:
        OSError: if that cannot be known.
    """
    try:
        return read_bytes(file, MAX_OWN_BYTES) if is_used(file) else b""
    except FileNotFoundError:
        return b""  # it was rolled back
    except ValueError as error:
        raise OSError(errno.EFBIG, str(error)) from None


def line_of(entry: Entry) -> bytes:
    """Return the line of a journal that says so."""
    return json.dumps(entry).encode() + b"\n"


def entry_of(line: bytes) -> Entry | None:
    """Return what a line says; None where it is none of ours, or cut off."""
    try:
        values = parse_json(line)
    except ValueError:
        return None
    if not isinstance(values, list) or len(values) != FIELDS:
        return None
    kind, path, other, number, when = values
    is_sound = isinstance(kind, str) and isinstance(path, str) and Path(path).is_absolute()
    is_sound = is_sound and (other is None or isinstance(other, str)) and "\0" not in path
    is_sound = is_sound and type(number) in (int, float) and type(when) is int
    if not is_sound or not math.isfinite(number) or not _may_have(kind, other or ""):
        return None
    return Entry(kind, path, other, number, when)


def _may_have(kind: str, other: str) -> bool:
    """Return whether an entry can have this second field; "" as a path is the current folder."""
    if kind == "gone":
        return not other or other.isdecimal()
    is_ours = kind == "renamed" or bool(_OURS.fullmatch(Path(other).name))
    return kind not in _WITH_ORIGINAL or (is_ours and Path(other).is_absolute())


def copies_in(folder: Path) -> list[Path]:
    """Return the copies of journals in one folder: regular files, links left out."""
    with contextlib.suppress(OSError):
        named = [path for path in folder.iterdir() if path.name.startswith(BESIDE)]
        return [path for path in named if stat.S_ISREG(path.lstat().st_mode)]
    return []


def is_used(copy: Path) -> bool:
    """Return whether a process of its trial lives: each holds a lock on it."""
    try:
        with _opened(copy) as number:
            fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno == errno.EWOULDBLOCK
    return False


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[int]:
    number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield number
    finally:
        os.close(number)


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o600)


def _line(kind: str, path: str, other: str | None, number: float) -> bytes:
    # The first end of a line closes what another process may have left half written.
    return b"\n" + line_of(Entry(kind, path, other, number, time.monotonic_ns()))


_WITH_ORIGINAL = ("moved", "copied", "tree", "renamed")
_OURS = re.compile(rf"\..*\.flatout-\d+-\d+|{re.escape(BESIDE)}.*", re.DOTALL)
"""Names of what was moved aside, and of the journals alongside it."""


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
    """Return whether a rename may change anything.

    False where it will fail for what is there.
    """
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
    """Return whether the script may believe a folder empty: it holds nothing but our asides."""
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


def is_folder(path: str | Path) -> bool:
    """Return whether a path is a folder and not a link to one."""
    return Path(path).is_dir() and not Path(path).is_symlink()


def is_at_or_below(path: str, root: str) -> bool:
    """Return whether a path is `root` or is below it.

    >>> is_at_or_below("/data/old", "/data"), is_at_or_below("/data-old", "/data")
    (True, False)
    """
    return path == root or path.startswith(root + os.sep)


def move(path: str, aside: str) -> None:
    """Leave nothing of a file: it is about to be made again."""
    Path(path).rename(aside)


def move_and_copy(path: str, aside: str) -> None:
    """Leave a copy of a file: it is about to be changed."""
    move(path, aside)
    shutil.copy2(aside, path)


def move_and_touch(path: str, aside: str) -> None:
    """Leave an empty file: it is about to be removed."""
    move(path, aside)
    Path(path).touch(0o600)
