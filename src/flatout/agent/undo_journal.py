"""Undo journal: whatever the script writes is rolled back when its trial is over.

No path is redirected (that breaks scripts that read back what they wrote, and C++ compilers that
look for headers). An audit hook sees every open, mkdir, link, rename and remove *before* it
happens, notes it and moves the original aside; the supervisor rolls back, also after a crash.
What cannot be noted does not happen: the process ends, and with it the trial.
"""

import contextlib
import errno
import functools
import itertools
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from flatout.agent import patching
from flatout.agent.journal_file import (
    FORBIDDEN,
    JournalWriter,
    UnrecordedError,
    below,
    can_rename,
    is_at_or_below,
    is_folder,
    looks_empty,
    move,
    move_and_copy,
    move_and_touch,
    resolve,
    status_of,
)

CLOCK_SLACK_S = 2.0
"""File systems stamp files by clocks that lag behind ours: by a tick, on FAT by two seconds."""
MAX_NAME = 50
"""Characters of a name that its aside repeats: names may have 255 bytes, a character four."""
UNRECORDED_EXIT_CODE = 114
"""Of a process that would have changed something which could not be noted."""
UNRECORDED_SIGN = 2
"""Byte of the heartbeat in which it says so, the error number in the next: a full disk has room for
that, and the supervisor ends the trial whichever process it was."""
MAX_TRIES = 1000
"""Events after which a file that was to be opened is taken not to have been made."""
GONE = 0
"""In place of an inode: the script removed what was there."""
_WRITING_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
_Saving = Callable[[str, str], None]


def install(folder: Path, skip: Sequence[str]) -> None:
    """Journal this process's writes into `folder`, those below the paths in `skip` left out."""
    hook = _Hook(folder.resolve(), (*skip, str(folder)))
    os.register_at_fork(after_in_child=hook.renew_lock)
    sys.addaudithook(hook)


def announce_torch_save() -> None:
    """Make `torch.save(path)` visible to the journal: it opens its file in C++."""
    import torch

    def announcing(save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def announced(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(f, str | os.PathLike):
                sys.audit("open", os.fspath(f), "w", 0)
            result = save(obj, f, *args, **kwargs)
            sys.audit("flatout.saved")  # any event: the file is there now, so its inode gets noted
            return result

        return patching.named(announced, "torch", "save")

    patching.wrap(torch, "save", announcing)


class _Hook:
    """The audit hook. One per process; forked children inherit it and append to one journal."""

    def __init__(self, folder: Path, skip: tuple[str, ...]) -> None:
        self.journal = JournalWriter(folder)
        self.folder = folder
        self.skip = tuple(os.path.realpath(path) for path in skip if path)
        # Paths whose former state is in the journal, with the inode of what the script has there
        # now (None: not known yet, or a folder): that may be lost, what others put there may not.
        self.made: dict[str, int | None] = {}
        # Files that the script is about to make: their inode is noted at the next event.
        self.pending: dict[str, int] = {}
        # Where originals are that were renamed.
        self.moved_in: list[str] = []
        self.heartbeat = _open_heartbeat(folder)
        self.numbers = itertools.count()
        self.thread = threading.local()
        self.renew_lock()

    def renew_lock(self) -> None:
        """Forget the lock: in a forked child its holder does not exist."""
        self.lock = threading.Lock()

    def __call__(self, event: str, args: tuple[Any, ...]) -> None:
        if getattr(self.thread, "is_busy", False):
            return
        is_ours = event in _EVENTS and (event != "open" or _is_writing(*args[1:]))
        if not is_ours and not self.pending:
            return  # without waiting for the lock
        self.thread.is_busy = True
        try:
            # Two threads may open one file: the second must not see it half copied.
            with self.lock:
                self._settle()
                if is_ours:
                    _EVENTS[event](self, *args)
        except (TypeError, ValueError):
            pass  # no path at all: the call itself says so
        except UnrecordedError as error:
            self._end(str(error), error.number)
        except OSError as error:
            self._end(f"{args[0]!r}: {error.strerror}", error.errno or errno.EIO)
        finally:
            self.thread.is_busy = False

    def _end(self, what: str, number: int) -> NoReturn:
        """End the process: an exception would stop the call, but scripts go on after those."""
        said = f"flatout: cannot be recorded, so it was not done: {what}\n"
        with contextlib.suppress(OSError):
            os.write(2, said.encode(errors="backslashreplace"))  # a name may not be UTF-8
        if self.heartbeat is not None:
            with contextlib.suppress(OSError):
                os.pwrite(self.heartbeat, bytes((1, number % 256)), UNRECORDED_SIGN)
        os._exit(UNRECORDED_EXIT_CODE)

    def _settle(self) -> None:
        """Note which files the calls before made: by that they are told from other programs'."""
        for path, tries in list(self.pending.items()):
            status = status_of(path)
            if status is None and tries < MAX_TRIES:
                self.pending[path] = tries + 1
                continue
            del self.pending[path]
            if status is not None:
                self._note_made(path, status.st_ino)

    def _note_made(self, path: str, inode: int) -> None:
        self.journal.note("made", path, inode)
        self.made[path] = inode

    def _note_new(self, path: str) -> None:
        """Note a file that is about to be made."""
        self.journal.note("new", path)
        self._await(path)

    def _await(self, path: str) -> None:
        self.made[path] = None
        self.pending[path] = 0

    def _is_ours(self, path: str) -> bool:
        """Return whether what has this name now was put there by the script."""
        if path not in self.made:
            return False
        status, inode = status_of(path), self.made[path]
        return status is None or inode is None or status.st_ino == inode

    def on_open(self, raw: Any, mode: Any, _flags: int) -> None:
        """Note a file that is about to be written; the event does not tell `dir_fd`."""
        is_emptied = isinstance(mode, str) and "w" in mode
        self._before_write(raw, leaves=move if is_emptied else move_and_copy)

    def on_truncate(self, raw: Any, _length: int) -> None:
        """Note a file that is about to be cut; one given by its descriptor is noted already."""
        self._before_write(raw, leaves=move_and_copy)

    def on_remove(self, raw: Any, dir_fd: int) -> None:
        """Note a file or link that is about to go."""
        path = self._find(raw, dir_fd)
        status = None if path is None else status_of(path)
        if path is None or status is None or stat.S_ISDIR(status.st_mode):
            return
        if not self._is_ours(path):
            self._before_loss(path, leaves=move_and_touch)
        if path in self.made and (left := status_of(path)) is not None:
            # What has this name later, though with the same inode, is another file.
            self.journal.note("gone", path, left.st_ino, str(left.st_mtime_ns))
            self.made[path] = GONE
            self.pending.pop(path, None)

    def on_mkdir(self, raw: Any, _mode: int, dir_fd: int) -> None:
        """Note a new folder; one that is made again hides nothing that was noted below it."""
        path = self._find(raw, dir_fd)
        if path is None or os.path.lexists(path):
            return
        self.journal.note("folder", path, time.time() - CLOCK_SLACK_S)
        if path in self.made:
            self._forget(path)
        self.made[path] = None

    def on_symlink(self, _target: Any, raw: Any, dir_fd: int) -> None:
        """Note a new link."""
        path = self._find(raw, dir_fd)
        if path is not None and not os.path.lexists(path):
            self._note_new(path)

    def on_link(self, _source: Any, raw: Any, _source_fd: int, dir_fd: int) -> None:
        """Note a second name of a file; writing by it would change the first, so it is not ours."""
        path = self._find(raw, dir_fd)
        if path is None or os.path.lexists(path):
            return
        self.journal.note("new", path)
        self.made.pop(path, None)

    def on_rmdir(self, raw: Any, dir_fd: int) -> None:
        """Move aside a folder that is about to go: it may hold what was moved aside before."""
        path = self._find(raw, dir_fd)
        if path is not None and is_folder(path) and looks_empty(path):
            self._before_rmdir(path)

    def on_rmtree(self, raw: Any, dir_fd: int | None = None) -> None:
        """Move a tree aside as a whole, unless all of it was made here."""
        path = self._find(raw, dir_fd)
        if path is not None and is_folder(path) and not self._made_all(path):
            self._move_tree(path)

    def on_rename(self, raw: Any, raw_target: Any, dir_fd: int, target_fd: int) -> None:
        """Note a rename, and first what it replaces."""
        source, target = resolve(raw, dir_fd), resolve(raw_target, target_fd)
        if source is None or target is None or not can_rename(source, target):
            return
        if not self._is_skipped(target):
            self._before_replacing(source, target)
            self._before_moving(source, target)
        elif not self._is_skipped(source):
            self._before_leaving(source)

    def _before_replacing(self, source: str, target: str) -> None:
        if not os.path.lexists(target):
            return
        if is_folder(source):
            self._before_rmdir(target)
        elif not self._is_ours(target):
            self._before_loss(target, leaves=move)

    def _before_moving(self, source: str, target: str) -> None:
        """Note what the target will be: new, or what had another name before."""
        moves_folder, is_skipped = is_folder(source), self._is_skipped(source)
        inode = os.lstat(source).st_ino
        if moves_folder and is_skipped:
            self.journal.note("folder", target)
            self.made[target] = None
        elif is_skipped or (not moves_folder and self._is_ours(source)):
            if target not in self.made:
                self.journal.note("new", target)
            self._note_made(target, inode)
            if source in self.made:
                self.made[source] = GONE
        else:
            self.journal.note_original("renamed", source, target, inode)
            self.moved_in.append(target)
            if not moves_folder:  # another program has put it there
                self.made.pop(source, None)
            self.pending.pop(target, None)
            self._carry(source, target)

    def _before_write(self, raw: Any, *, leaves: _Saving) -> None:
        path = self._find(raw, None, follows=True)
        if path is None or path in self.pending:
            return
        if not os.path.lexists(path):
            self._note_new(path)
        elif not self._is_ours(path):
            self._before_loss(path, leaves=leaves)

    def _before_loss(self, path: str, *, leaves: _Saving) -> None:
        """Save what has this name and is not ours; `leaves` moves a file as is needed."""
        status = status_of(path)
        if status is None:
            return
        if stat.S_ISLNK(status.st_mode):
            target = str(Path(path).readlink())
            self.journal.note_original("link", path, target, status.st_mtime_ns)
            self._await(path)
        elif stat.S_ISREG(status.st_mode):
            self._move_aside(path, leaves)

    def _before_rmdir(self, path: str) -> None:
        if path not in self.made or any(Path(path).iterdir()):
            self._move_tree(path)

    def _before_leaving(self, path: str) -> None:
        """Save what is about to be renamed to a place where nothing is journaled."""
        if is_folder(path):
            self._copy_tree(path, self._aside(path))
        elif not self._is_ours(path):
            self._before_loss(path, leaves=move_and_copy)

    def _move_aside(self, path: str, leaves: _Saving) -> None:
        """Rename the original (same file system, so at once) and put back what is needed."""
        aside = self._aside(path)
        self.journal.note_original("moved", path, aside)
        try:
            leaves(path, aside)
        except FileNotFoundError:
            if os.path.lexists(aside):
                raise
            return self._note_new(path)  # another program was faster
        except OSError as error:
            if os.path.lexists(aside) or error.errno not in FORBIDDEN:
                raise
            if leaves is move_and_touch or not os.access(path, os.W_OK):
                return None  # the call will not succeed either
            # Its folder allows no rename, while the file itself may be written.
            return self._copy_aside(path, Path(aside).name)
        if leaves is move_and_copy:
            return self._note_made(path, os.lstat(path).st_ino)
        return self._await(path)

    def _copy_aside(self, path: str, name: str) -> None:
        aside = str(self.folder / name)
        shutil.copy2(path, aside)
        with Path(aside).open("rb") as file:
            os.fsync(file.fileno())
        self.journal.note_original("copied", path, aside)
        self.made[path] = None

    def _move_tree(self, path: str) -> None:
        """Rename a folder and leave an empty one, so that there is something to remove.

        In one that was made here a compiler, say, has left what it made.
        """
        aside = self._aside(path)
        since = time.time() - CLOCK_SLACK_S
        holds_originals = any(is_at_or_below(place, path) for place in self.moved_in)
        is_new = path in self.made and not holds_originals
        self.journal.note_original("tree", path, aside, since, is_new=is_new)
        try:
            if is_at_or_below(str(Path.cwd()), path):
                raise OSError("our working folder would be renamed with it")
            Path(path).rename(aside)
        except OSError:
            if not os.access(Path(path).parent, os.W_OK):
                aside = str(self.folder / Path(aside).name)
            self._copy_tree(path, aside)
            return
        Path(path).mkdir()
        self._forget(path)
        self.made[path] = None

    def _copy_tree(self, path: str, aside: str) -> None:
        """Copy a folder aside; from then on all of the original may be lost."""
        self.journal.note("folder", aside)
        shutil.copytree(path, aside, symlinks=True)
        self.journal.note_original("tree", path, aside)
        self.made.update(dict.fromkeys((path, *below(path))))

    def _aside(self, path: str) -> str:
        """Return a free name alongside the path."""
        name = Path(path).name[:MAX_NAME]
        while True:
            number = next(self.numbers)
            aside = Path(path).with_name(f".{name}.flatout-{os.getpid()}-{number}")
            if not os.path.lexists(aside):
                return str(aside)

    def _made_all(self, path: str) -> bool:
        return path in self.made and all(self._is_ours(inner) for inner in below(path))

    def _carry(self, source: str, target: str) -> None:
        """Let what is ours in a folder stay ours when it is renamed."""
        inside = [path for path in self.made if is_at_or_below(path, source)]
        self._forget(target)
        for path in inside:
            self.made[target + path[len(source) :]] = self.made.pop(path)

    def _forget(self, root: str) -> None:
        for path in [path for path in self.made if is_at_or_below(path, root)]:
            del self.made[path]

    def _find(self, raw: Any, dir_fd: int | None, *, follows: bool = False) -> str | None:
        """Return the path that an event means, None where it is not journaled."""
        path = resolve(raw, dir_fd, follows=follows)
        return None if path is None or self._is_skipped(path) else path

    def _is_skipped(self, path: str) -> bool:
        return any(is_at_or_below(path, root) for root in self.skip)


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


def _open_heartbeat(folder: Path) -> int | None:
    with contextlib.suppress(OSError):  # where no supervisor is, no one looks
        return os.open(folder / "heartbeat", os.O_WRONLY | os.O_CLOEXEC)
    return None
