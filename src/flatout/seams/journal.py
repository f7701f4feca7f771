"""Undo journal: whatever the script writes is rolled back when its trial is over.

No path is redirected (that breaks scripts that read back what they wrote, and C++ compilers that
look for headers). An audit hook sees every open, mkdir, link, rename and remove *before* it
happens, notes it and moves the original aside; the supervisor rolls back, also after a crash.
"""

import contextlib
import fcntl
import functools
import itertools
import json
import os
import re
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from flatout.seams.naming import named
from flatout.seams.undo import undo

FIELDS = 4
"""Of an entry: kind, path, and two that depend on the kind."""
JOURNAL_NAME = "journal"
CLOCK_SLACK_S = 2.0
"""File systems stamp files by clocks that lag behind ours: by a tick, on FAT by two seconds."""
MAX_NAME = 50
"""Characters of a name that its aside repeats: names may have 255 bytes, a character four."""
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_Saving = Callable[[str, str], None]
_ASIDE = re.compile(r"\..*\.flatout-\d+-\d+", re.DOTALL)


def install(folder: Path, skip: Sequence[str]) -> None:
    """Journal this process's writes into `folder`, those below the paths in `skip` left out."""
    file = os.open(folder / JOURNAL_NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    hook = _Hook(file, folder.resolve(), (*skip, str(folder)))
    os.register_at_fork(after_in_child=hook.renew_lock)
    sys.addaudithook(hook)


def announce_torch_save() -> None:
    """Make `torch.save(path)` visible to the journal: it opens its file in C++."""
    import torch

    save = torch.save

    @functools.wraps(save)
    def announced(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            sys.audit("open", os.fspath(f), "w", 0)
        return save(obj, f, *args, **kwargs)

    torch.save = named(announced, "torch", "save")


def rollback(folder: Path) -> int:
    """Undo everything that the journal in `folder` lists, latest first; return how many entries.

    Repeating it is harmless, also after it was killed: what is undone is cut off the journal. (To
    undo "a file is new" twice would delete what was renamed back to that name in between.)
    """
    journal = folder / JOURNAL_NAME
    if not journal.exists():
        return 0
    num_undone = 0
    with journal.open("r+b") as file:
        lines = file.readlines()
        end = sum(map(len, lines))
        for line in reversed(lines):
            # A process that was killed in mid-write leaves half an entry, of nothing done yet.
            with contextlib.suppress(json.JSONDecodeError):
                entry = json.loads(line)
                if len(entry) == FIELDS:  # others are of a flatout before the first release
                    undo(*entry)
                    num_undone += 1
            end -= len(line)
            file.truncate(end)
    journal.unlink()
    return num_undone


class _Hook:
    """The audit hook. One per process; forked children inherit it and append to one journal."""

    def __init__(self, file: int, folder: Path, skip: tuple[str, ...]) -> None:
        self.file = file
        self.folder = folder
        self.skip = tuple(os.path.realpath(path) for path in skip if path)
        # Paths whose former state is in the journal: what is there now may be lost.
        self.seen: set[str] = set()
        self.numbers = itertools.count()
        self.thread = threading.local()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Forget the lock: in a forked child its holder does not exist."""
        self.lock = threading.Lock()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS or getattr(self.thread, "is_busy", False):
            return
        if event == "open" and not _is_writing(*args[1:]):
            return  # without waiting for the lock
        self.thread.is_busy = True
        try:
            # Two threads may open one file: the second must not see it half copied.
            with self.lock:
                _EVENTS[event](self, *args)
        except (OSError, TypeError, ValueError):
            pass  # never end the training: the trial reports changed files as its own defect
        finally:
            self.thread.is_busy = False

    def on_open(self, raw: Any, mode: Any, _flags: int) -> None:
        """Note a file that is about to be written; the event does not tell `dir_fd`."""
        is_emptied = isinstance(mode, str) and "w" in mode
        self._before_write(raw, leaves=_move if is_emptied else _move_and_copy)

    def on_truncate(self, raw: Any, _length: int) -> None:
        """Note a file that is about to be cut; one given by its descriptor is noted already."""
        self._before_write(raw, leaves=_move_and_copy)

    def on_remove(self, raw: Any, dir_fd: int) -> None:
        """Note a file or link that is about to go."""
        path = self._find(raw, dir_fd)
        if path is not None:
            self._before_loss(path, leaves=_move_and_touch)

    def on_mkdir(self, raw: Any, _mode: int, dir_fd: int) -> None:
        """Note a new folder; one that is made again hides nothing that was noted below it."""
        path = self._find(raw, dir_fd)
        if path is None or os.path.lexists(path):
            return
        self._note("folder", path, None, time.time() - CLOCK_SLACK_S)
        if path in self.seen:
            self._forget(path)
        self.seen.add(path)

    def on_symlink(self, _target: Any, raw: Any, dir_fd: int) -> None:
        """Note a new link."""
        path = self._find(raw, dir_fd)
        if path is None or path in self.seen or os.path.lexists(path):
            return
        self._note("new", path)
        self.seen.add(path)

    def on_link(self, _source: Any, raw: Any, _source_fd: int, dir_fd: int) -> None:
        """Note a second name of a file; writing by it would change the first, so it is not ours."""
        path = self._find(raw, dir_fd)
        if path is None or os.path.lexists(path):
            return
        self._note("new", path)
        self.seen.discard(path)

    def on_rmdir(self, raw: Any, dir_fd: int) -> None:
        """Move aside a folder that is about to go: it may hold what was moved aside before."""
        path = self._find(raw, dir_fd)
        if path is not None and _is_folder(path) and _looks_empty(path):
            self._before_rmdir(path)

    def on_rmtree(self, raw: Any, dir_fd: int | None = None) -> None:
        """Move a tree aside as a whole, unless all of it was made here."""
        path = self._find(raw, dir_fd)
        if path is not None and _is_folder(path) and not self._made_all(path):
            self._move_tree(path)

    def on_rename(self, raw: Any, raw_target: Any, dir_fd: int, target_fd: int) -> None:
        """Note a rename, and first what it replaces."""
        source, target = _resolve(raw, dir_fd), _resolve(raw_target, target_fd)
        if source is None or target is None or not _can_rename(source, target):
            return
        if not self._is_skipped(target):
            self._before_replacing(source, target)
            self._before_moving(source, target)
        elif not self._is_skipped(source):
            self._before_leaving(source)

    def _before_replacing(self, source: str, target: str) -> None:
        if _is_folder(source) and os.path.lexists(target):
            self._before_rmdir(target)
        else:
            self._before_loss(target, leaves=_move)

    def _before_moving(self, source: str, target: str) -> None:
        """Note what the target will be: new, or what had another name before."""
        is_folder, is_skipped = _is_folder(source), self._is_skipped(source)
        if is_folder and is_skipped:
            self._note("folder", target, None, 0)
        elif is_skipped or (source in self.seen and not is_folder):
            if target not in self.seen:
                self._note("new", target)
        else:
            self._note("renamed", source, target, os.lstat(source).st_ino)
            self._carry(source, target)
            return
        self.seen.add(target)

    def _before_write(self, raw: Any, *, leaves: _Saving) -> None:
        path = self._find(raw, None, follows=True)
        if path is None or path in self.seen:
            return
        if os.path.lexists(path):
            self._before_loss(path, leaves=leaves)
        else:
            self._note("new", path)
            self.seen.add(path)

    def _before_loss(self, path: str, *, leaves: _Saving) -> None:
        """Save what has this name, if it is not ours; `leaves` moves a file as is needed."""
        if path in self.seen or not os.path.lexists(path):
            return
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            self._note("link", path, str(Path(path).readlink()), status.st_mtime_ns)
        elif stat.S_ISREG(status.st_mode):
            self._move_aside(path, leaves)
        else:
            return
        self.seen.add(path)

    def _before_rmdir(self, path: str) -> None:
        if path not in self.seen or any(Path(path).iterdir()):
            self._move_tree(path)

    def _before_leaving(self, path: str) -> None:
        """Save what is about to be renamed to a place where nothing is journaled."""
        if _is_folder(path):
            self._copy_tree(path, self._aside(path))
        else:
            self._before_loss(path, leaves=_move_and_copy)

    def _move_aside(self, path: str, leaves: _Saving) -> None:
        """Rename the original (same file system, so at once) and put back what is needed."""
        aside = self._aside(path)
        self._note("moved", path, aside)
        try:
            leaves(path, aside)
        except OSError:
            if os.path.lexists(aside):
                raise
            # Its folder allows no rename, while the file itself may be written.
            aside = str(self.folder / Path(aside).name)
            shutil.copy2(path, aside)
            self._note("copied", path, aside)

    def _move_tree(self, path: str) -> None:
        """Rename a folder and leave an empty one, so that there is something to remove."""
        aside = self._aside(path)
        self._note("tree", path, aside, time.time() - CLOCK_SLACK_S)
        try:
            if _is_at_or_below(str(Path.cwd()), path):
                raise OSError("our working folder would be renamed with it")
            Path(path).rename(aside)
        except OSError:
            self._copy_tree(path, aside)
            return
        Path(path).mkdir()
        self._forget(path)
        self.seen.add(path)

    def _copy_tree(self, path: str, aside: str) -> None:
        """Copy a folder aside; from then on all of the original may be lost."""
        self._note("folder", aside, None, 0)
        shutil.copytree(path, aside, symlinks=True)
        self._note("tree", path, aside, 0)
        self.seen.update((path, *_below(path)))

    def _aside(self, path: str) -> str:
        """Return a free name beside the path."""
        name = Path(path).name[:MAX_NAME]
        while True:
            number = next(self.numbers)
            aside = Path(path).with_name(f".{name}.flatout-{os.getpid()}-{number}")
            if not os.path.lexists(aside):
                return str(aside)

    def _made_all(self, path: str) -> bool:
        return path in self.seen and all(inner in self.seen for inner in _below(path))

    def _carry(self, source: str, target: str) -> None:
        """Let what is ours in a folder stay ours when it is renamed."""
        inside = [path for path in self.seen if _is_at_or_below(path, source)]
        self._forget(target)
        self.seen.difference_update(inside)
        self.seen.update(target + path[len(source) :] for path in inside)

    def _forget(self, root: str) -> None:
        self.seen = {path for path in self.seen if not _is_at_or_below(path, root)}

    def _find(self, raw: Any, dir_fd: int | None, *, follows: bool = False) -> str | None:
        """Return the path that an event means, None where it is not journaled."""
        path = _resolve(raw, dir_fd, follows=follows)
        return None if path is None or self._is_skipped(path) else path

    def _is_skipped(self, path: str) -> bool:
        return any(_is_at_or_below(path, root) for root in self.skip)

    def _note(self, kind: str, path: str, other: str | None = None, number: float = 0) -> None:
        os.write(self.file, (json.dumps([kind, path, other, number]) + "\n").encode())


_EVENTS: dict[str, Callable[..., None]] = {
    "open": _Hook.on_open,
    "os.truncate": _Hook.on_truncate,
    "os.remove": _Hook.on_remove,
    "os.mkdir": _Hook.on_mkdir,
    "os.symlink": _Hook.on_symlink,
    "os.link": _Hook.on_link,
    "os.rmdir": _Hook.on_rmdir,
    "os.rename": _Hook.on_rename,
    "shutil.rmtree": _Hook.on_rmtree,
}


def _is_writing(mode: Any, flags: int) -> bool:
    if isinstance(mode, str):
        return bool(set(mode) & set("wax+"))
    return bool(flags & _WRITING_FLAGS)


def _move(path: str, aside: str) -> None:
    Path(path).rename(aside)


def _move_and_copy(path: str, aside: str) -> None:
    _move(path, aside)
    shutil.copy2(aside, path)


def _move_and_touch(path: str, aside: str) -> None:
    _move(path, aside)
    Path(path).touch(0o600)


def _resolve(raw: Any, dir_fd: int | None, *, follows: bool = False) -> str | None:
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


def _can_rename(source: str, target: str) -> bool:
    """Tell whether a rename may change anything; false where it will fail for what stands there."""
    moved = os.lstat(source)
    if _is_at_or_below(target, source):
        return False
    if not os.path.lexists(target):
        return True
    replaced = os.lstat(target)
    if os.path.samestat(moved, replaced):
        return False
    if stat.S_ISDIR(moved.st_mode) != stat.S_ISDIR(replaced.st_mode):
        return False
    return not stat.S_ISDIR(replaced.st_mode) or _looks_empty(target)


def _looks_empty(folder: str) -> bool:
    """Tell whether the script may believe a folder empty: it holds nothing but our asides."""
    return all(_ASIDE.fullmatch(path.name) for path in Path(folder).iterdir())


def _below(folder: str) -> Iterator[str]:
    for root, folders, names in os.walk(folder):
        yield from (str(Path(root) / name) for name in (*folders, *names))


def _is_folder(path: str) -> bool:
    return Path(path).is_dir() and not Path(path).is_symlink()


def _is_at_or_below(path: str, root: str) -> bool:
    """Tell whether a path is `root` or lies below it.

    >>> _is_at_or_below("/data/old", "/data"), _is_at_or_below("/data-old", "/data")
    (True, False)
    """
    return path == root or path.startswith(root + os.sep)
