"""One flatout at a time in a folder: a lock that the kernel drops when its last holder is gone.

The lock is on the folder itself, so it leaves no file there, holds for every name of the folder
(links, mounts, other containers of this host), and needs no clean-up after `kill -9`.
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

POLL_S = 0.2
"""How often a lock that is held elsewhere is asked for again; a trial lasts seconds."""
WAIT_S = 900.0
"""The longest wait: a trial that compiles a large model may need minutes."""


class FolderBusyError(Exception):
    """Another process holds the folder."""


@contextlib.contextmanager
def hold_folder(
    folder: Path, spare: Path, *, shared: bool = False, limit_s: float = 0.0
) -> Iterator[int]:
    """Hold a folder, and give the descriptor: a child that inherits it holds the lock, too.

    Args:
        folder: what to hold.
        spare: where lock files go where the folder cannot be locked itself, as on NFS.
        shared: whether others may hold it shared at the same time.
        limit_s: how long to wait for others.

    Raises:
        FolderBusyError: if others hold it longer than that.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            _lock(descriptor, how, folder, limit_s)
        except OSError:
            file = spare_file(os.fstat(descriptor), spare)
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
            os.close(descriptor)
            descriptor = opened
            _lock(descriptor, how, folder, limit_s)
        yield descriptor
    finally:
        os.close(descriptor)


def spare_file(status: os.stat_result, spare: Path) -> Path:
    """Return where a file or folder is locked instead, where its file system has no locks."""
    name = hashlib.sha256(f"{status.st_dev} {status.st_ino}".encode()).hexdigest()[:16]
    (spare / "locks").mkdir(exist_ok=True)
    return spare / "locks" / name


def _lock(descriptor: int, how: int, folder: Path, limit_s: float) -> None:
    ends_at = time.monotonic() + limit_s
    is_told = False
    while True:
        try:
            return fcntl.flock(descriptor, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
        if time.monotonic() >= ends_at:
            raise FolderBusyError(f"another flatout is at work in {folder}")
        if not is_told:
            sys.stderr.write(f"flatout: another flatout runs a trial in {folder}; waiting\n")
            is_told = True
        time.sleep(POLL_S)
